package blobd

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
)

// requestID is the request ID in the head of a request; empty if it has none.
func requestID(head string) string {
	found := regexp.MustCompile(`(?m)^x-request-id: (.*)\r$`).FindStringSubmatch(head + "\r\n")
	if found == nil {
		return ""
	}
	return found[1]
}

// requestOf is the request ID in a daemon's error; empty if it has none.
func requestOf(err error) string {
	var refused *DaemonError
	if !errors.As(err, &refused) {
		return ""
	}
	return refused.Request
}

// echo refuses every request, and names the request's own ID.
func echo(p *peer) {
	p.respond(404, fmt.Sprintf(`{"error":{"code":"not_found","message":"m","request":%q}}`, requestID(string(p.request))))
}

func TestRequestsOfOneClientHaveOnePrefixAndDifferentNumbers(t *testing.T) {
	client := fakeDaemon(t, echo)
	first := requestOf(version(client))
	prefix, numbered := strings.CutSuffix(first, ".1")
	if !numbered || !regexp.MustCompile(`^[0-9a-f]{12}$`).MatchString(prefix) {
		t.Fatal(first)
	}
	if second := requestOf(open(client)); second != prefix+".2" {
		t.Error(first, second)
	}
	if other := requestOf(version(&Client{Socket: client.Socket})); strings.HasPrefix(other, prefix) || other == "" {
		t.Error(first, other)
	}
}

func TestCallerCanChooseThePrefixOfItsRequests(t *testing.T) {
	client := fakeDaemon(t, echo)
	for _, prefix := range []string{"a", "Job_7.step-2", "123e4567-e89b-12d3-a456-426614174000", strings.Repeat("z", 43)} {
		chosen := &Client{Socket: client.Socket, RequestPrefix: prefix}
		if found := requestOf(version(chosen)); found != prefix+".1" {
			t.Error(prefix, found)
		}
	}
}

func TestPrefixThatIsNoPartOfAnIDIsRefusedBeforeConnecting(t *testing.T) {
	for _, prefix := range []string{"a b", "a\r\nx: y", "a\n", "é", "a/b", "\xff", strings.Repeat("z", 44)} {
		for _, action := range []func(*Client) error{version, open} {
			err := action(&Client{Socket: "/nowhere", RequestPrefix: prefix})
			if !errors.Is(err, ErrRequestPrefix) || CodeOf(err) != CodeInvalidRequest {
				t.Error(prefix, err)
			}
		}
	}
}

func TestGoroutinesThatShareAClientShareNoID(t *testing.T) {
	var ids requestIDs
	var seen sync.Map
	var group sync.WaitGroup
	for range make([]int, 8) {
		group.Add(1)
		go func() {
			defer group.Done()
			for range make([]int, 100) {
				id, err := ids.next("")
				if _, twice := seen.LoadOrStore(id, true); twice || err != nil {
					t.Error(id, err)
				}
			}
		}()
	}
	group.Wait()
}

func TestRequestOfAnErrorIsKeptAndNotPartOfItsText(t *testing.T) {
	for request, expected := range map[string]string{`,"request":"x.1"`: "x.1", "": ""} {
		body := `{"error":{"code":"internal","message":"m","hint":"h"` + request + `}}`
		for _, script := range []func(*peer){
			func(p *peer) { p.respond(500, body) },
			func(p *peer) { p.send(upgraded); p.frame(body) },
		} {
			err := open(fakeDaemon(t, script))
			if requestOf(err) != expected || err.Error() != "m; h" {
				t.Error(err, requestOf(err))
			}
		}
	}
	expectFailure(t, ErrProtocol, "", func(p *peer) {
		p.respond(500, `{"error":{"code":"internal","message":"m","request":7}}`)
	}, open)
}
