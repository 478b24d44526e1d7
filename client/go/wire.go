package blobd

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"
)

const (
	// maxFrameBytes limits the JSON of a frame.
	maxFrameBytes = 1 << 20
	// maxFdsPerBatch limits the descriptors attached to one frame, and unacknowledged.
	maxFdsPerBatch = 64
	// maxHeadBytes limits the head of a response.
	maxHeadBytes = 16 << 10
	// maxBodyBytes limits the body of a response: details of a model with 131,072 tensors are below it.
	maxBodyBytes = 256 << 20
	// receiveBytes is the buffer of one system call: the tables of an ordinary model need one or two.
	receiveBytes = 64 << 10
)

// wire is the connection of one request, with its received but unread bytes and descriptors. Everything
// is received with recvmsg, from the first byte of a response on: after an upgrade, frames with
// descriptors follow its head immediately, and a plain read would lose them without an error.
type wire struct {
	conn    *net.UnixConn
	timeout time.Duration
	// id is the ID of the request.
	id      string
	in      *bufio.Reader
	fds     []int
	control []byte
}

func newWire(conn *net.UnixConn, timeout time.Duration, id string) *wire {
	control := make([]byte, syscall.CmsgSpace(maxFdsPerBatch*4))
	w := &wire{conn: conn, timeout: timeout, id: id, control: control}
	w.in = bufio.NewReaderSize(receiver{w}, receiveBytes)
	return w
}

// close closes the connection and the descriptors that were received and not used.
func (w *wire) close() {
	w.conn.Close()
	closeAll(w.fds)
	w.fds = nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}

// receiver fills the buffer of a wire.
type receiver struct{ *wire }

func (r receiver) Read(into []byte) (int, error) {
	if r.timeout > 0 {
		r.conn.SetReadDeadline(time.Now().Add(r.timeout))
	}
	// The net package sets close-on-exec.
	count, controlCount, flags, _, err := r.conn.ReadMsgUnix(into, r.control)
	if err != nil {
		return 0, connectionError(err)
	}
	if err := r.keepFds(r.control[:controlCount]); err != nil {
		return 0, err
	}
	if flags&syscall.MSG_CTRUNC != 0 {
		return 0, fail(ErrFdsLost, "descriptors: this process has too many files open to take those "+
			"of the model; raise `ulimit -n` or close some")
	}
	if count == 0 {
		return 0, connectionError(io.EOF)
	}
	return count, nil
}

func (w *wire) keepFds(control []byte) error {
	messages, err := syscall.ParseSocketControlMessage(control)
	if err != nil {
		return violated("control message is malformed: %v", err)
	}
	for _, message := range messages {
		// Control messages other than descriptors are ignored.
		if fds, err := syscall.ParseUnixRights(&message); err == nil {
			w.fds = append(w.fds, fds...)
		}
	}
	if len(w.fds) > maxFdsPerBatch {
		return violated("more than %d descriptors received unacknowledged", maxFdsPerBatch)
	}
	return nil
}

func (w *wire) send(data []byte) error {
	if w.timeout > 0 {
		w.conn.SetWriteDeadline(time.Now().Add(w.timeout))
	}
	_, err := w.conn.Write(data)
	if errors.Is(err, syscall.EPIPE) {
		// A daemon that refuses early also closes early; its response can still be read.
		return nil
	}
	return connectionError(err)
}

// frame is the content of the next frame, which must be of this kind. An error frame is returned as
// an error.
func (w *wire) frame(kind string) (json.RawMessage, error) {
	var head [4]byte
	if _, err := io.ReadFull(w.in, head[:]); err != nil {
		return nil, connectionError(err)
	}
	length := binary.LittleEndian.Uint32(head[:])
	if length > maxFrameBytes {
		return nil, violated("frame of %d bytes announced, at most %d allowed", length, maxFrameBytes)
	}
	text := make([]byte, length)
	if _, err := io.ReadFull(w.in, text); err != nil {
		return nil, connectionError(err)
	}
	var frame map[string]json.RawMessage
	if err := parse(text, &frame, "frame"); err != nil {
		return nil, err
	}
	if len(frame) != 1 {
		return nil, violated("keys of a frame: expected 1, found %d", len(frame))
	}
	for found, content := range frame {
		if found == kind {
			return content, nil
		}
		if found == "error" {
			return nil, errorIn(content)
		}
		return nil, violated("frame: expected %q, found %q", kind, found)
	}
	return nil, nil
}

func errorIn(content []byte) error {
	var known envelope
	if err := parse(content, &known, "error"); err != nil {
		return err
	}
	return known.asError()
}

// batch receives and acknowledges the next descriptors. The caller owns them from then on.
func (w *wire) batch(received, fdCount uint64) ([]int, error) {
	content, err := w.frame("fds")
	if err != nil {
		return nil, err
	}
	var announced struct {
		First *uint64 `json:"first"`
		Count uint64  `json:"count"`
	}
	if err := parse(content, &announced, "fds"); err != nil {
		return nil, err
	}
	count := announced.Count
	if announced.First == nil || *announced.First != received || count == 0 ||
		count > fdCount-received || count > maxFdsPerBatch {
		return nil, violated("%d descriptors received out of order after %d of %d", count, received, fdCount)
	}
	if uint64(len(w.fds)) != count {
		return nil, violated("%d descriptors received with a frame that announces %d", len(w.fds), count)
	}
	ack := fmt.Sprintf(`{"ack":{"received":%d}}`, received+count)
	if err := w.send(append(binary.LittleEndian.AppendUint32(nil, uint32(len(ack))), ack...)); err != nil {
		return nil, err
	}
	fds := w.fds
	w.fds = nil
	return fds, nil
}

// query is the body of the response to `GET path`.
func (w *wire) query(path string) ([]byte, error) {
	request := fmt.Sprintf("GET %s HTTP/1.1\r\nhost: blobd\r\nconnection: close\r\n"+
		"x-request-id: %s\r\n\r\n", path, w.id)
	if err := w.send([]byte(request)); err != nil {
		return nil, err
	}
	return w.readResponse(http.StatusOK)
}

// upgrade sends `POST path` and reads the response's head; from then on the connection carries frames.
func (w *wire) upgrade(path string, params any) error {
	body, err := json.Marshal(params)
	if err != nil {
		return err
	}
	request := fmt.Sprintf("POST %s HTTP/1.1\r\nhost: blobd\r\nconnection: upgrade\r\n"+
		"upgrade: blobd-fd/1\r\nx-request-id: %s\r\n"+
		"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s",
		path, w.id, len(body), body)
	if err := w.send([]byte(request)); err != nil {
		return err
	}
	_, err = w.readResponse(http.StatusSwitchingProtocols)
	return err
}

// readResponse returns the body of a response with this status; for another status it returns the daemon's error.
func (w *wire) readResponse(expected int) ([]byte, error) {
	head, err := w.head()
	if err != nil {
		return nil, err
	}
	// The head is read first and alone, so that no byte of the frames after it is consumed.
	whole := bufio.NewReader(io.MultiReader(bytes.NewReader(head), w.in))
	response, err := http.ReadResponse(whole, nil)
	if err != nil {
		return nil, violated("response is not HTTP: %v", err)
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusSwitchingProtocols && expected == response.StatusCode {
		return nil, nil
	}
	body, err := readBody(response)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == expected {
		return body, nil
	}
	var refusal struct {
		Error *envelope `json:"error"`
	}
	if json.Unmarshal(body, &refusal) == nil && refusal.Error != nil {
		return nil, refusal.Error.asError()
	}
	return nil, violated("status of the response: expected %d, found %d", expected, response.StatusCode)
}

// head is the head of a response with the empty line that ends it.
func (w *wire) head() ([]byte, error) {
	var head []byte
	for !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		line, err := w.in.ReadSlice('\n')
		head = append(head, line...)
		if len(head) > maxHeadBytes || errors.Is(err, bufio.ErrBufferFull) {
			return nil, violated("response's head is longer than the %d bytes allowed", maxHeadBytes)
		}
		if err != nil {
			return nil, connectionError(err)
		}
		if string(head) == "\r\n" {
			return nil, violated("response is not HTTP: no status")
		}
	}
	return head, nil
}

func readBody(response *http.Response) ([]byte, error) {
	if response.ContentLength > maxBodyBytes {
		return nil, violated("response's body is longer than the %d bytes allowed", maxBodyBytes)
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, maxBodyBytes+1))
	if err != nil {
		return nil, bodyError(err)
	}
	if len(body) > maxBodyBytes {
		return nil, violated("response's body is longer than the %d bytes allowed", maxBodyBytes)
	}
	return body, nil
}

// bodyError distinguishes malformed chunks from a failed connection.
func bodyError(err error) error {
	var known *failure
	if errors.As(err, &known) || errors.Is(err, io.ErrUnexpectedEOF) {
		return connectionError(err)
	}
	return violated("response's body is malformed: %v", err)
}

// parse reads JSON; what names it in errors.
func parse(text []byte, into any, what string) error {
	if err := json.Unmarshal(text, into); err != nil {
		return violated("%s is not the JSON expected: %v", what, err)
	}
	return nil
}

// connectionError turns an error of a socket into one of this package; errors that already are of this
// package stay unchanged.
func connectionError(err error) error {
	var known *failure
	switch {
	case err == nil || errors.As(err, &known):
		return err
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return fail(ErrClosed, "blobd daemon: closed the connection before its response was complete; see its log")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fail(ErrTimedOut, "blobd daemon: silent for longer than the timeout; try again or allow it longer")
	}
	text := strings.TrimSpace(err.Error())
	return &failure{kind: ErrConnection, text: "blobd daemon: connection failed: " + text + "; try again", cause: err}
}
