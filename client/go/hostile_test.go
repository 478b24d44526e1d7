package blobd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// expectFailure runs an action against a fake daemon with this script. It must fail with this error
// and this text, and leak no descriptor.
func expectFailure(t *testing.T, kind error, part string, script func(*peer), action func(*Client) error) {
	t.Helper()
	client := fakeDaemon(t, script)
	before := openFds(t)
	err := action(client)
	if err == nil || kind != nil && !errors.Is(err, kind) || !strings.Contains(err.Error(), part) {
		t.Errorf("%v, expected %v with %q", err, kind, part)
	}
	for try := 0; openFds(t) > before; try++ {
		// The fake daemon's end is closed when its goroutine ends.
		if try == 200 {
			t.Fatalf("%d descriptors more", openFds(t)-before)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func version(client *Client) error { _, err := client.Version(); return err }

func open(client *Client) error { _, err := client.Open("m"); return err }

func TestDaemonThatIsAwaySaysWhatToStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "blobd.sock")
	err := open(&Client{Socket: path})
	if !errors.Is(err, ErrNotRunning) ||
		err.Error() != "blobd daemon: nothing listens on "+path+"; start it with `blobd serve`" {
		t.Error(err)
	}
	listener, _ := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	listener.SetUnlinkOnClose(false)
	listener.Close()
	if err := open(&Client{Socket: path}); !errors.Is(err, ErrNotRunning) {
		t.Error(err)
	}
}

func TestDefaultSocketsAreTheSystemsThenTheUsers(t *testing.T) {
	uid := os.Geteuid()
	users := fmt.Sprintf("/run/user/%d/blobd/blobd.sock /tmp/blobd-%d/blobd.sock]", uid, uid)
	for runtime, expected := range map[string]string{
		"/x":                             "[/run/blobd/blobd.sock /x/blobd/blobd.sock " + users,
		"relative":                       "[/run/blobd/blobd.sock " + users,
		fmt.Sprintf("/run/user/%d", uid): "[/run/blobd/blobd.sock " + users,
	} {
		t.Setenv("XDG_RUNTIME_DIR", runtime)
		if found := fmt.Sprint(DefaultSockets()); found != expected {
			t.Errorf("%s: %s, %s expected", runtime, found, expected)
		}
	}
}

func TestDirectoryThatOthersCouldHaveMadeIsRefused(t *testing.T) {
	directory, uid := t.TempDir(), os.Geteuid()
	if err := errors.Join(os.Chmod(directory, 0o700), checkPrivate(directory, uid)); err != nil {
		t.Error(err)
	}
	err := checkPrivate(directory, uid+1)
	if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "wrong owner") {
		t.Error(err)
	}
	link := filepath.Join(directory, "link")
	if err := os.Symlink(directory, link); err != nil {
		t.Fatal(err)
	}
	if err := checkPrivate(link, uid); err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Error(err)
	}
	if err := errors.Join(os.Chmod(directory, 0o711), checkPrivate(directory, uid)); err == nil ||
		!strings.Contains(err.Error(), "wrong mode: expected 0700, found 0711") {
		t.Error(err)
	}
	if err := checkPrivate(filepath.Join(directory, "absent"), uid); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func TestRefusedUserLearnsWhatToDo(t *testing.T) {
	for _, hint := range []struct {
		mode, gid uint32
		text      string
	}{
		{0o600, 7, "only uid 5 may connect"},
		{0o660, 0, "the daemon's owner can set socket_group"},
		{0o660, 987654, "join the group 987654 and log in again"},
	} {
		if found := hintFor(hint.mode, 5, hint.gid); !strings.Contains(found, hint.text) {
			t.Error(found)
		}
	}
}

func TestOtherFailuresToConnectHaveTheirReason(t *testing.T) {
	err := version(&Client{Socket: "/tmp/" + strings.Repeat("x", 200)})
	if !errors.Is(err, ErrConnect) || !strings.Contains(err.Error(), "cannot connect to /tmp/x") {
		t.Error(err)
	}
	err = connectError("/run/x.sock", os.NewSyscallError("connect", syscall.EACCES))
	if CodeOf(err) != CodeDenied || !strings.Contains(err.Error(), "does not admit you") {
		t.Error(err)
	}
}

func TestSilentDaemonTimesOut(t *testing.T) {
	client := fakeDaemon(t, (*peer).waitForClose)
	client.Timeout = 50 * time.Millisecond
	for _, action := range []func(*Client) error{version, open} {
		if err := action(client); !errors.Is(err, ErrTimedOut) {
			t.Error(err)
		}
	}
}

func TestErrorsHaveTheProtocolsCode(t *testing.T) {
	for _, code := range []Code{CodeNotFound, CodeBusy, CodeCorrupt, CodeNoSpace, CodeDenied, "tired"} {
		body := fmt.Sprintf(`{"error":{"code":%q,"message":"model x: so","hint":"do this"}}`, code)
		err := version(fakeDaemon(t, func(p *peer) { p.respond(404, body) }))
		expected := code
		if code == "tired" {
			expected = CodeInternal
		}
		var refused *DaemonError
		if !errors.As(err, &refused) || CodeOf(err) != expected || err.Error() != "model x: so; do this" {
			t.Error(err, CodeOf(err))
		}
	}
}

func TestResponsesThatAreNoProtocolAreRefused(t *testing.T) {
	chunked := "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
	for _, response := range []string{
		"SSH-2.0-x\r\n\r\n", "\r\n\r\n", "HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}",
		"HTTP/1.1 200 OK\r\nx: " + strings.Repeat("y", 20000),
		"HTTP/1.1 200 OK\r\n" + strings.Repeat("x: y\r\n", 5000),
		"HTTP/1.1 200 OK\r\ncontent-length: 9999999999\r\n\r\n",
		"HTTP/1.1 101 X\r\n\r\n",
		chunked + "x\r\n", chunked + "1\r\n{xx\r\n",
		"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
		"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + strings.Repeat("[", 200000),
	} {
		expectFailure(t, ErrProtocol, "", func(p *peer) { p.send(response) }, version)
	}
}

func TestResponseCutOffIsClosed(t *testing.T) {
	for _, response := range []string{"", "HTTP/1.1 200", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"} {
		expectFailure(t, ErrClosed, "see its log", func(p *peer) { p.send(response) }, version)
	}
}

func TestChunkedBodyAndUnknownFieldsAreRead(t *testing.T) {
	client := fakeDaemon(t, func(p *peer) {
		p.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"pid\r\n13\r\n\":7,\"mood\":\"fine\"}\n\r\n0\r\n\r\n")
	})
	if version, err := client.Version(); err != nil || version.Pid != 7 {
		t.Error(version, err)
	}
}

func TestRequestIsAsTheProtocolWantsIt(t *testing.T) {
	requests := make(chan string, 1)
	client := fakeDaemon(t, func(p *peer) {
		requests <- string(p.request)
		p.head(0, 0)
		p.waitForClose()
	})
	model, err := client.OpenSelection("llama3:8b", Selection{Component: "model", Prefix: "blk."})
	if err != nil {
		t.Fatal(err)
	}
	model.Close()
	head, body, _ := strings.Cut(<-requests, "\r\n\r\n")
	if !strings.HasPrefix(head, "POST /v1/open HTTP/1.1\r\n") || !strings.Contains(head, "upgrade: blobd-fd/1") ||
		requestID(head) == "" {
		t.Error(head)
	}
	if body != `{"component":"model","reference":"llama3:8b","tensors":{"prefix":"blk."}}` {
		t.Error(body)
	}
}

func TestBatchesAreAcknowledgedOneByOne(t *testing.T) {
	acks := make(chan string, 2)
	client := fakeDaemon(t, func(p *peer) {
		p.head(0, 66)
		for _, batch := range [][2]int{{0, 64}, {64, 2}} {
			p.fdsFrame(batch[0], batch[1], batch[1])
			ack := make([]byte, 4+len(`{"ack":{"received":64}}`))
			p.conn.Read(ack)
			acks <- string(ack[4:])
		}
		p.waitForClose()
	})
	model, err := client.Open("m")
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	for _, expected := range []string{`{"ack":{"received":64}}`, `{"ack":{"received":66}}`} {
		if ack := <-acks; ack != expected {
			t.Error(ack)
		}
	}
}

func TestOversizedFrameIsRefusedBeforeItIsRead(t *testing.T) {
	for _, length := range []string{"\x01\x00\x10\x00", "\xff\xff\xff\xff"} {
		expectFailure(t, ErrProtocol, "at most 1048576 allowed", func(p *peer) { p.send(upgraded + length) }, open)
	}
}

func TestFramesThatMakeNoSenseAreRefused(t *testing.T) {
	for _, frame := range []string{
		``, `[]`, `{}`, `7`, `{`, `{"a":1,"b":2}`, `{"open":3}`, `{"open":{}}`, `{"error":{}}`, `{"fds":{}}`,
		`{"open":{"name":"m","digest":"d","layers":[],"tensor_count":-1,"fd_count":0}}`,
		`{"open":{"name":"m","digest":"d","layers":[],"tensor_count":99999999,"fd_count":0}}`,
		`{"open":{"name":"m","digest":"d","layers":[],"tensor_count":0,"fd_count":4294967296}}`,
		`{"open":{"name":"m","digest":"d","layers":[{"fd":0}],"tensor_count":0,"fd_count":0}}`,
		`{"open":{"name":"m","digest":"d","layers":[{"header":{"fd":0}}],"tensor_count":0,"fd_count":0}}`,
		`{"open":{"name":"m","digest":"d","layers":[{"piece_count":1}],"tensor_count":0,"fd_count":0}}`,
	} {
		expectFailure(t, ErrProtocol, "", func(p *peer) { p.send(upgraded); p.frame(frame) }, open)
	}
}

func entry(t *testing.T, fields map[string]any) string {
	t.Helper()
	tensor := map[string]any{"name": "t", "type": "F32", "shape": []int{16}, "layer": 0, "fd": 0, "offset": 0, "size": 64}
	for name, value := range fields {
		tensor[name] = value
	}
	text, err := json.Marshal(tensor)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestTensorsThatMakeNoSenseAreRefused(t *testing.T) {
	for part, fields := range map[string]map[string]any{
		"no such layer":               {"layer": 1},
		"beyond the number announced": {"fd": 1},
		"bytes without a descriptor":  {"fd": nil},
		"ends beyond 2^64":            {"offset": uint64(1<<64 - 1)},
		"Tensor.offset":               {"offset": -1},
		"Tensor.size":                 {"size": 1.5},
		"Tensor.shape":                {"shape": []int{-1}},
		"experts do not add up":       {"experts": map[string]int{"count": 3, "stride": 3}},
		"its experts do not":          {"experts": map[string]uint64{"count": 1 << 63, "stride": 2}, "size": 0},
		"is not the JSON expected: j": {"name": 3},
	} {
		expectFailure(t, ErrProtocol, part, func(p *peer) {
			p.head(1, 1)
			p.frame(`{"tensors":[` + entry(t, fields) + `]}`)
		}, open)
	}
	for _, list := range []string{`[]`, `[` + entry(t, nil) + `,` + entry(t, nil) + `]`} {
		expectFailure(t, ErrProtocol, "expected 1 to 1", func(p *peer) {
			p.head(1, 1)
			p.frame(`{"tensors":` + list + `}`)
		}, open)
	}
}

func TestFlippedBytesNeverPanic(t *testing.T) {
	var whole bytes.Buffer
	whole.WriteString(upgraded)
	for _, frame := range []string{
		`{"open":{"name":"m","digest":"d","layers":[` + oneLayer + `],"tensor_count":1,"fd_count":0}}`,
		`{"tensors":[` + entry(t, map[string]any{"fd": nil, "size": 0, "experts": map[string]int{"count": 0}}) + `]}`,
	} {
		write(&whole, uint32(len(frame)))
		whole.WriteString(frame)
	}
	random, opened := rand.New(rand.NewSource(7)), 0
	responses := make(chan string, 1)
	client := fakeDaemon(t, func(p *peer) { p.send(<-responses) })
	for range make([]int, 500) {
		broken := bytes.Clone(whole.Bytes())
		for range make([]int, random.Intn(3)) {
			values := "\x00\x01\xff0-9\"{}[],:\\ez"
			broken[random.Intn(len(broken))] = values[random.Intn(len(values))]
		}
		responses <- string(broken)
		if model, err := client.Open("m"); err == nil {
			opened++
			model.Close()
		}
	}
	if opened < 100 {
		t.Error(opened)
	}
}

func TestErrorFrameIsTheDaemonsError(t *testing.T) {
	expectFailure(t, nil, "blob x: damaged", func(p *peer) {
		p.head(1, 1)
		p.frame(`{"error":{"code":"corrupt","message":"blob x: damaged"}}`)
	}, open)
	expectFailure(t, ErrClosed, "see its log", func(p *peer) { p.head(1, 1) }, open)
}

func TestBatchesThatBreakTheirPromiseAreRefusedAndLeakNothing(t *testing.T) {
	for _, batch := range []struct {
		first, count, attached int
		kind                   error
		part                   string
	}{
		{1, 1, 1, ErrProtocol, "out of order"},
		{0, 0, 1, ErrProtocol, "out of order"},
		{0, 99, 1, ErrProtocol, "out of order"},
		{0, 2, 1, ErrProtocol, "1 descriptors received with a frame that announces 2"},
		{0, 1, 2, ErrProtocol, "2 descriptors received with a frame that announces 1"},
		{0, 64, 65, nil, "descriptors"},
	} {
		expectFailure(t, batch.kind, batch.part, func(p *peer) {
			p.head(0, 98)
			p.fdsFrame(batch.first, batch.count, batch.attached)
			p.waitForClose()
		}, open)
	}
}

// openWithWrongTable opens a model whose only file is this descriptor's, with a table that does not match the file.
func openWithWrongTable(t *testing.T, fd int, tensors ...string) *Model {
	t.Helper()
	client := fakeDaemon(t, func(p *peer) {
		p.head(len(tensors), 1, strings.Replace(oneLayer, `"size":64`, `"size":99,"fd":0,"header":{"fd":0,"size":99}`, 1))
		p.frame(`{"tensors":[` + strings.Join(tensors, ",") + `]}`)
		p.frame(`{"fds":{"first":0,"count":1}}`, fd)
		p.waitForClose()
	})
	model, err := client.Open("m")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { model.Close(); syscall.Close(fd) })
	return model
}

func TestTensorBehindTheEndOfItsFileIsNeverTouched(t *testing.T) {
	for _, length := range []int{0, 63} {
		model := openWithWrongTable(t, fileOf(length), entry(t, nil))
		_, err := model.Map("t")
		if !errors.Is(err, ErrShort) || CodeOf(err) != CodeCorrupt ||
			!strings.Contains(err.Error(), fmt.Sprintf("length of its file: expected 64 bytes, found %d", length)) {
			t.Error(err)
		}
		if _, err := model.Header(); !errors.Is(err, ErrShort) {
			t.Error(err)
		}
		if _, _, err := model.Text("model"); !errors.Is(err, ErrShort) {
			t.Error(err)
		}
	}
}

func TestWhatIsNoFileIsNotMapped(t *testing.T) {
	folder, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openWithWrongTable(t, folder, entry(t, nil)).Map("t"); !errors.Is(err, ErrMap) {
		t.Error(err)
	}
}

func TestTensorsAreCutToTheirSize(t *testing.T) {
	model := openWithWrongTable(t, fileOf(100), entry(t, map[string]any{"size": 4}), entry(t, map[string]any{"size": 8}),
		entry(t, map[string]any{"name": "empty", "fd": nil, "size": 0, "shape": []int{0}}))
	// The first of two tensors with one name.
	if data, err := model.Map("t"); err != nil || len(data) != 4 || cap(data) != 4 {
		t.Error(len(data), err)
	}
	if data, err := model.MapTensor(model.Tensors()[1]); err != nil || len(data) != 8 {
		t.Error(len(data), err)
	}
	if data, err := model.Map("empty"); err != nil || len(data) != 0 {
		t.Error(len(data), err)
	}
	foreign := uint64(9)
	if _, err := model.MapTensor(Tensor{Fd: &foreign, Size: 1}); !errors.Is(err, ErrMap) {
		t.Error(err)
	}
	if _, err := model.MapTensor(Tensor{Fd: model.Tensors()[0].Fd, Offset: 1<<64 - 1, Size: 2}); !errors.Is(err, ErrShort) {
		t.Error(err)
	}
}

func TestRepeatedFileHasTheHeaderOfItsFirstLayer(t *testing.T) {
	layer := `{"media_type":"application/vnd.ollama.image.model","digest":"d","size":64,"piece_count":0%s}`
	client := fakeDaemon(t, func(p *peer) {
		p.head(0, 1, fmt.Sprintf(layer, `,"header":{"fd":0,"size":8}`)+","+fmt.Sprintf(layer, ""))
		p.fdsFrame(0, 1, 1)
		p.waitForClose()
	})
	model, err := client.Open("m")
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	if header, err := model.LayerHeader(1); err != nil || string(header) != strings.Repeat("\a", 8) {
		t.Error(header, err)
	}
}

func TestTextIsTheLayers(t *testing.T) {
	client := fakeDaemon(t, func(p *peer) {
		p.head(0, 1, `{"media_type":"application/vnd.ollama.image.template","digest":"d","size":64,"fd":0,"piece_count":0}`)
		p.fdsFrame(0, 1, 1)
		p.waitForClose()
	})
	model, err := client.Open("m")
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	if text, found, err := model.Text("template"); err != nil || !found || text != strings.Repeat("\a", 64) {
		t.Error(text, found, err)
	}
}

func TestComponentsOfTheWellKnownMediaTypes(t *testing.T) {
	for mediaType, expected := range map[string]string{
		"application/vnd.ollama.image.model":               "model",
		"application/vnd.ollama.image.params":              "params",
		"application/vnd.docker.container.image.v1+json":   "config",
		"application/vnd.docker.ai.gguf.v3":                "model",
		"application/vnd.docker.ai.mmproj":                 "projector",
		"application/vnd.cncf.model.weight.v1.raw":         "model",
		"application/vnd.cnai.model.config.v1+json":        "config",
		"application/vnd.cncf.model.weight.config.v1.raw":  "weight.config",
		"application/vnd.docker.ai.chat.template.jinja":    "template",
		"application/vnd.docker.ai.license":                "license",
		"application/vnd.docker.ai.model.file":             "file",
		"application/vnd.docker.ai.model.config.v0.1+json": "config",
		"application/vnd.docker.ai.model.file.v1+gguf":     "model",
		"text/plain": "text/plain",
	} {
		if found := component(mediaType); found != expected {
			t.Error(mediaType, found)
		}
	}
}
