package blobd

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// libraryCase is a header with the verdict of the safetensors library.
type libraryCase struct {
	verdict, name string
	file          []byte
}

// libraryCases reads the table that tests/safetensors_cases.py writes, which explains the columns.
func libraryCases(t *testing.T) (cases []libraryCase) {
	t.Helper()
	table, err := os.ReadFile(filepath.Join("..", "..", "store-format", "src", "safetensors", "library_cases.tsv"))
	if err != nil {
		t.Fatal(err)
	}
	escape := regexp.MustCompile(`\\x(..)`)
	for _, line := range strings.Split(strings.TrimSuffix(string(table), "\n"), "\n") {
		if strings.HasPrefix(line, "#") {
			continue
		}
		columns := strings.Split(line, "\t")
		header := escape.ReplaceAllFunc([]byte(columns[5]), func(found []byte) []byte {
			number, err := strconv.ParseUint(string(found[2:]), 16, 8)
			if err != nil {
				t.Fatal(err)
			}
			return []byte{byte(number)}
		})
		spaces, _ := strconv.Atoi(columns[3])
		data, _ := strconv.Atoi(columns[4])
		header = append(header, bytes.Repeat([]byte{' '}, spaces)...)
		file := []byte{}
		if columns[2] != "-1" {
			length, err := strconv.ParseUint(columns[2], 10, 64)
			if err != nil {
				length = uint64(len(header))
			}
			file = append(binary.LittleEndian.AppendUint64(file, length), append(header, make([]byte, data)...)...)
		}
		cases = append(cases, libraryCase{columns[0], columns[1], file})
	}
	return cases
}

func TestHeadersAreAcceptedExactlyIfTheLibraryAcceptsThem(t *testing.T) {
	cases := libraryCases(t)
	if len(cases) != 235 {
		t.Fatalf("%d cases", len(cases))
	}
	for _, each := range cases {
		_, err := parseSafetensors(each.file)
		if (err == nil) != (each.verdict == "accepted") {
			t.Errorf("%s: expected %s, found %v", each.name, each.verdict, err)
		}
	}
}

func headerFile(text string, data int) []byte {
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(file, text...), make([]byte, data)...)
}

func TestLastEntryOfARepeatedNameCounts(t *testing.T) {
	const entry = `"a":{"dtype":"%s","shape":[1],"data_offsets":[0,1]}`
	header, err := parseSafetensors(headerFile("{"+fmt.Sprintf(entry, "I8")+","+fmt.Sprintf(entry, "U8")+"}", 1))
	if err != nil || len(header.tensors) != 1 || header.tensor("a").dtype != "U8" {
		t.Fatal(header, err)
	}
}

func TestLimitsOfAHeaderAreNamed(t *testing.T) {
	const entry = `{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`
	many := make([]string, maxSafetensorsTensors+1)
	for place := range many {
		many[place] = fmt.Sprintf(`"%d":%s`, place, entry)
	}
	texts := make([]string, maxMetadata+1)
	for place := range texts {
		texts[place] = fmt.Sprintf(`"%d":""`, place)
	}
	ones := strings.TrimSuffix(strings.Repeat("1,", maxDimensions+1), ",")
	for _, each := range [][2]string{
		{"{" + strings.Join(many, ",") + "}", "more than 131072 tensors"},
		{`{"a":{"dtype":"U8","shape":[` + ones + `],"data_offsets":[0,1]}}`, "expected at most 1024"},
		{`{"` + strings.Repeat("a", maxNameBytes+1) + `":` + entry + "}", "too long: expected at most 65536"},
		{`{"__metadata__":{` + strings.Join(texts, ",") + "}}", "more than 65536 entries of metadata"},
		{`{"__metadata__":{"a":"` + strings.Repeat("x", maxTextBytes) + `"}}`, "bytes of names and metadata"},
	} {
		if _, err := parseSafetensors(headerFile(each[0], 1)); err == nil || !strings.Contains(err.Error(), each[1]) {
			t.Errorf("expected %q, found %.200v", each[1], err)
		}
	}
}
