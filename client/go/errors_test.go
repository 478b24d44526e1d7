package blobd

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"
)

// documentedCodes are the codes in the table of error codes in docs/PROTOCOL.md.
func documentedCodes(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "PROTOCOL.md"))
	if err != nil {
		t.Fatal(err)
	}
	var codes []string
	// Code, meaning, HTTP status, exit code.
	row := regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| .* \\| [45][0-9]{2} \\| [0-9] \\|$")
	for _, found := range row.FindAllStringSubmatch(string(text), -1) {
		codes = append(codes, found[1])
	}
	slices.Sort(codes)
	return codes
}

// declaredCodes are the values of the constants of type Code.
func declaredCodes(t *testing.T) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var codes []string
	ast.Inspect(file, func(node ast.Node) bool {
		declared, ok := node.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, named := declared.Type.(*ast.Ident); named && kind.Name == "Code" {
			for _, value := range declared.Values {
				codes = append(codes, unquoted(t, value))
			}
		}
		return true
	})
	slices.Sort(codes)
	return codes
}

func unquoted(t *testing.T, value ast.Expr) string {
	t.Helper()
	text, err := strconv.Unquote(value.(*ast.BasicLit).Value)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestEveryCodeOfTheProtocolIsKnown(t *testing.T) {
	documented := documentedCodes(t)
	if len(documented) < 12 {
		t.Fatal("the table of error codes was not found: ", documented)
	}
	var known []string
	for code := range codes {
		known = append(known, string(code))
	}
	slices.Sort(known)
	if declared := declaredCodes(t); !slices.Equal(documented, declared) || !slices.Equal(documented, known) {
		t.Errorf("the protocol has %v, the constants %v, codes %v", documented, declared, known)
	}
}

func TestEveryCodeOfTheProtocolArrives(t *testing.T) {
	for _, code := range append(documentedCodes(t), "tired") {
		body := fmt.Sprintf(`{"error":{"code":%q,"message":"m"}}`, code)
		expected := Code(code)
		if code == "tired" {
			expected = CodeInternal
		}
		if err := version(fakeDaemon(t, func(p *peer) { p.respond(500, body) })); CodeOf(err) != expected {
			t.Error(code, err, CodeOf(err))
		}
	}
}
