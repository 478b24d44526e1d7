package blobd

import (
	"errors"
	"fmt"
)

// Code says what kind a failure is, in the protocol's words. Programs decide by it, or by the Err
// values; texts are for people.
type Code string

// The codes of protocol version 1.
const (
	CodeInvalidRequest Code = "invalid_request"
	CodeInvalidInput   Code = "invalid_input"
	CodeNotFound       Code = "not_found"
	CodeBusy           Code = "busy"
	CodeCorrupt        Code = "corrupt"
	CodeNoSpace        Code = "no_space"
	CodeReadOnly       Code = "read_only"
	CodeDenied         Code = "denied"
	CodeUpstream       Code = "upstream"
	CodeInternal       Code = "internal"
)

// What can go wrong beside what the daemon answers; to be found with errors.Is.
var (
	// ErrNotRunning: there is no socket, or nobody behind it.
	ErrNotRunning = errors.New("daemon not running")
	// ErrConnect: the socket is there and cannot be connected to.
	ErrConnect = errors.New("cannot connect")
	// ErrClosed: the daemon went away before its answer was complete.
	ErrClosed = errors.New("connection closed")
	// ErrTimedOut: the daemon took or sent nothing for longer than the client's timeout.
	ErrTimedOut = errors.New("timed out")
	// ErrConnection: the socket failed in the middle of an exchange.
	ErrConnection = errors.New("connection failed")
	// ErrProtocol: what came is not the protocol.
	ErrProtocol = errors.New("protocol violated")
	// ErrFdsLost: descriptors did not fit this process's limit.
	ErrFdsLost = errors.New("descriptors lost")
	// ErrNoTensor: no tensor with this name was opened.
	ErrNoTensor = errors.New("no such tensor")
	// ErrNoLayer: no such layer, or not of the kind asked for.
	ErrNoLayer = errors.New("no such layer")
	// ErrNoExpert: the tensor is no stack of experts, or has not that many.
	ErrNoExpert = errors.New("no such expert")
	// ErrShort: the file behind a descriptor is shorter than the table says.
	ErrShort = errors.New("file too short")
	// ErrMap: the kernel does not map a file.
	ErrMap = errors.New("cannot map")
	// ErrSessionClosed: the model was closed by this program.
	ErrSessionClosed = errors.New("model closed")
)

// DaemonError is the daemon's answer that a request failed.
type DaemonError struct {
	// Code is what kind of failure it is.
	Code Code
	// Message says what is wrong.
	Message string
	// Hint says what to do about it, if the daemon knows.
	Hint string
}

// Error is the message and the hint.
func (e *DaemonError) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + "; " + e.Hint
}

// CodeOf is the code of a failure: the daemon's own if it told one.
func CodeOf(err error) Code {
	var daemon *DaemonError
	var known *failure
	switch {
	case errors.As(err, &daemon):
		return daemon.Code
	case errors.As(err, &known) && known.code != "":
		return known.code
	case errors.Is(err, ErrNoTensor), errors.Is(err, ErrNoLayer), errors.Is(err, ErrNoExpert):
		return CodeNotFound
	case errors.Is(err, ErrShort):
		return CodeCorrupt
	}
	return CodeInternal
}

// failure is one of the Err values with a text that says what happened and what to do.
type failure struct {
	kind  error
	text  string
	cause error
	code  Code
}

func (f *failure) Error() string { return f.text }

func (f *failure) Unwrap() []error {
	if f.cause == nil {
		return []error{f.kind}
	}
	return []error{f.kind, f.cause}
}

func fail(kind error, format string, arguments ...any) error {
	return &failure{kind: kind, text: fmt.Sprintf(format, arguments...)}
}

func violated(format string, arguments ...any) error {
	problem := fmt.Sprintf(format, arguments...)
	return fail(ErrProtocol, "blobd daemon: %s; are client and daemon of the same version?", problem)
}

// envelope is a failure as answers and frames have it.
type envelope struct {
	Code    *string `json:"code"`
	Message *string `json:"message"`
	Hint    string  `json:"hint"`
}

// asError is the daemon's error, whose code counts as internal if it is none that is known.
func (e *envelope) asError() error {
	if e == nil || e.Code == nil || e.Message == nil {
		return violated("error without code or message")
	}
	code := Code(*e.Code)
	switch code {
	case CodeInvalidRequest, CodeInvalidInput, CodeNotFound, CodeBusy, CodeCorrupt, CodeNoSpace,
		CodeReadOnly, CodeDenied, CodeUpstream:
	default:
		code = CodeInternal
	}
	return &DaemonError{Code: code, Message: *e.Message, Hint: e.Hint}
}
