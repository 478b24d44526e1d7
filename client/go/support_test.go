package blobd

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// spec is a tensor of a generated file.
type spec struct {
	name, kind string
	shape      []uint64
	data       []byte
}

// ID of a ggml type, elements per block, bytes per block.
var kinds = map[string][3]uint64{"F32": {0, 1, 4}, "F16": {1, 1, 2}, "Q8_0": {8, 32, 34}}

func tensorOf(name, kind string, shape ...uint64) spec {
	elements := uint64(1)
	for _, length := range shape {
		elements *= length
	}
	data := make([]byte, elements/kinds[kind][1]*kinds[kind][2])
	// Pseudo-random bytes that depend only on the name.
	for place := 0; place < len(data); place += sha256.Size {
		sum := sha256.Sum256([]byte(fmt.Sprint(name, place)))
		copy(data[place:], sum[:])
	}
	return spec{name, kind, shape, data}
}

// ggufOf is a GGUF file with these tensors.
func ggufOf(tensors []spec) []byte {
	var infos, data bytes.Buffer
	for _, tensor := range tensors {
		data.Write(make([]byte, -data.Len()&31))
		writeText(&infos, tensor.name)
		write(&infos, uint32(len(tensor.shape)), tensor.shape, uint32(kinds[tensor.kind][0]), uint64(data.Len()))
		data.Write(tensor.data)
	}
	var file bytes.Buffer
	file.WriteString("GGUF")
	write(&file, uint32(3), uint64(len(tensors)), uint64(1))
	writeText(&file, "general.architecture")
	write(&file, uint32(8))
	writeText(&file, "llama")
	file.Write(infos.Bytes())
	file.Write(make([]byte, -file.Len()&31))
	file.Write(data.Bytes())
	file.Write(make([]byte, -file.Len()&31))
	return file.Bytes()
}

func write(to io.Writer, values ...any) {
	for _, value := range values {
		binary.Write(to, binary.LittleEndian, value)
	}
}

func writeText(to *bytes.Buffer, text string) {
	write(to, uint64(len(text)))
	to.WriteString(text)
}

// daemon is `blobd serve` with its own store.
type daemon struct {
	t       *testing.T
	program string
	folder  string
	process *exec.Cmd
}

func startDaemon(t *testing.T) *daemon {
	t.Helper()
	program := os.Getenv("BLOBD_BIN")
	for _, profile := range []string{"debug", "release"} {
		built := filepath.Join("..", "..", "target", profile, "blobd")
		if _, err := os.Stat(built); program == "" && err == nil {
			program, _ = filepath.Abs(built)
		}
	}
	if program == "" {
		t.Skip("no blobd binary: `cargo build -p blobd`, or set BLOBD_BIN")
	}
	d := &daemon{t: t, program: program, folder: t.TempDir()}
	d.start()
	t.Cleanup(d.stop)
	return d
}

func (d *daemon) socket() string { return filepath.Join(d.folder, "blobd.sock") }

func (d *daemon) client() *Client { return &Client{Socket: d.socket(), Timeout: 30 * time.Second} }

func (d *daemon) environment() []string {
	return append(os.Environ(), "HOME="+d.folder, "XDG_CONFIG_HOME="+d.folder, "BLOBD_SOCKET="+d.socket())
}

func (d *daemon) start() {
	d.t.Helper()
	d.process = exec.Command(d.program, "--root", filepath.Join(d.folder, "store"), "serve")
	d.process.Env = d.environment()
	if err := d.process.Start(); err != nil {
		d.t.Fatal(err)
	}
	for range make([]int, 300) {
		if _, err := d.client().Version(); err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	d.t.Fatal("the daemon does not start")
}

// stop kills it, like a crash.
func (d *daemon) stop() {
	d.process.Process.Kill()
	d.process.Wait()
}

func (d *daemon) command(arguments ...string) string {
	d.t.Helper()
	command := exec.Command(d.program, arguments...)
	command.Env = d.environment()
	var stderr strings.Builder
	command.Stderr = &stderr
	output, err := command.Output()
	if err != nil {
		d.t.Fatalf("blobd %v: %v: %s", arguments, err, stderr.String())
	}
	return string(output)
}

func (d *daemon) importModel(name string, tensors []spec) {
	d.t.Helper()
	path := filepath.Join(d.folder, name+".gguf")
	if err := os.WriteFile(path, ggufOf(tensors), 0o600); err != nil {
		d.t.Fatal(err)
	}
	d.command("import", "--name", name, path)
}

func (d *daemon) sessionCount() int {
	d.t.Helper()
	var list struct{ Sessions []json.RawMessage }
	if err := json.Unmarshal([]byte(d.command("ps", "--json")), &list); err != nil {
		d.t.Fatal(err)
	}
	return len(list.Sessions)
}

// waitForNoSession waits until the daemon has ended all sessions, which it does shortly after a client
// closes its connection. It calls f before each check.
func (d *daemon) waitForNoSession(f func()) {
	d.t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		f()
		if d.sessionCount() == 0 {
			return
		}
	}
	d.t.Fatal("the session did not end")
}

// peer is the daemon's end of a connection; it can break every rule of the protocol.
type peer struct {
	conn    *net.UnixConn
	request []byte
}

const upgraded = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: blobd-fd/1\r\n\r\n"

// fakeDaemon runs a script on every connection, until the test ends.
func fakeDaemon(t *testing.T, script func(*peer)) *Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			script(newPeer(conn.(*net.UnixConn)))
			conn.Close()
		}
	}()
	t.Cleanup(func() { listener.Close(); <-done })
	return &Client{Socket: path, Timeout: 5 * time.Second}
}

func newPeer(conn *net.UnixConn) *peer {
	p := &peer{conn: conn}
	buffer := make([]byte, 65536)
	for !bytes.Contains(p.request, []byte("\r\n\r\n")) {
		count, err := conn.Read(buffer)
		if err != nil {
			break
		}
		p.request = append(p.request, buffer[:count]...)
	}
	return p
}

func (p *peer) send(text string) { p.conn.Write([]byte(text)) }

func (p *peer) respond(status int, body string) {
	p.send(fmt.Sprintf("HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s", status, len(body), body))
}

// frame sends a frame, with descriptors on its first byte.
func (p *peer) frame(text string, fds ...int) {
	data := append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...)
	var rights []byte
	if len(fds) > 0 {
		rights = syscall.UnixRights(fds...)
	}
	p.conn.WriteMsgUnix(data, rights, nil)
}

// fdsFrame sends `came` descriptors of a file of 64 bytes in a frame that announces `count`.
func (p *peer) fdsFrame(first, count, attached int) {
	fds := make([]int, attached)
	for place := range fds {
		fds[place] = fileOf(64)
	}
	p.frame(fmt.Sprintf(`{"fds":{"first":%d,"count":%d}}`, first, count), fds...)
	closeAll(fds)
}

const oneLayer = `{"media_type":"application/vnd.ollama.image.model","digest":"sha256:1","size":64,"piece_count":0}`

func (p *peer) head(tensors, fds int, layers ...string) {
	if len(layers) == 0 {
		layers = []string{oneLayer}
	}
	p.send(upgraded)
	p.frame(fmt.Sprintf(`{"open":{"name":"m","digest":"sha256:0","layers":[%s],"tensor_count":%d,"fd_count":%d}}`,
		strings.Join(layers, ","), tensors, fds))
}

// waitForClose keeps the connection open until the client closes it.
func (p *peer) waitForClose() { io.Copy(io.Discard, p.conn) }

// fileOf is a descriptor of an unlinked file of this size.
func fileOf(length int) int {
	file, err := os.CreateTemp("", "blobd-go-")
	if err != nil {
		panic(err)
	}
	defer file.Close()
	os.Remove(file.Name())
	file.Write(bytes.Repeat([]byte{7}, length))
	fd, err := syscall.Dup(int(file.Fd()))
	if err != nil {
		panic(err)
	}
	syscall.CloseOnExec(fd)
	return fd
}

func openFds(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
