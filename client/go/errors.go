package blobd

import (
	"errors"
	"fmt"
)

// Code is the kind of an error, as the protocol names it. Programs should decide by it, or by the
// Err values; texts are for people.
type Code string

// The codes of protocol version 1. A new one also belongs in codes, which a test compares with these.
const (
	CodeInvalidRequest Code = "invalid_request"
	CodeInvalidInput   Code = "invalid_input"
	CodeNotFound       Code = "not_found"
	CodeBusy           Code = "busy"
	CodeCorrupt        Code = "corrupt"
	CodeNoSpace        Code = "no_space"
	CodeOverQuota      Code = "over_quota"
	CodeReadOnly       Code = "read_only"
	CodeDenied         Code = "denied"
	CodeDeniedByPolicy Code = "denied_by_policy"
	CodeUpstream       Code = "upstream"
	CodeUnavailable    Code = "unavailable"
	CodeInternal       Code = "internal"
)

// codes are the known codes; any other code of a daemon counts as CodeInternal.
var codes = map[Code]bool{
	CodeInvalidRequest: true,
	CodeInvalidInput:   true,
	CodeNotFound:       true,
	CodeBusy:           true,
	CodeCorrupt:        true,
	CodeNoSpace:        true,
	CodeOverQuota:      true,
	CodeReadOnly:       true,
	CodeDenied:         true,
	CodeDeniedByPolicy: true,
	CodeUpstream:       true,
	CodeUnavailable:    true,
	CodeInternal:       true,
}

// Errors other than the daemon's error responses; test for them with errors.Is.
var (
	// ErrNotRunning: there is no socket, or no daemon listens on it.
	ErrNotRunning = errors.New("daemon not running")
	// ErrUnavailable: nothing listens on the system's socket, although this machine has a daemon for all its
	// users. A program that used another daemon now would not find the models of the system.
	ErrUnavailable = errors.New("system's daemon not available")
	// ErrConnect: the socket exists, but connecting to it failed.
	ErrConnect = errors.New("cannot connect")
	// ErrClosed: the daemon closed the connection before its response was complete.
	ErrClosed = errors.New("connection closed")
	// ErrTimedOut: the daemon neither received nor sent bytes within the client's timeout.
	ErrTimedOut = errors.New("timed out")
	// ErrConnection: the socket failed during a request.
	ErrConnection = errors.New("connection failed")
	// ErrProtocol: the received data does not follow the protocol.
	ErrProtocol = errors.New("protocol violated")
	// ErrFdsLost: descriptors were lost because of this process's limit of open files.
	ErrFdsLost = errors.New("descriptors lost")
	// ErrNoTensor: no tensor with this name was opened.
	ErrNoTensor = errors.New("no such tensor")
	// ErrNoLayer: there is no such layer, or it is not of the requested kind.
	ErrNoLayer = errors.New("no such layer")
	// ErrNoExpert: the tensor is not a stack of experts, or has no expert with this number.
	ErrNoExpert = errors.New("no such expert")
	// ErrShort: a descriptor's file is shorter than the tensor table says.
	ErrShort = errors.New("file too short")
	// ErrMap: a file cannot be mapped.
	ErrMap = errors.New("cannot map")
	// ErrGguf: a header is not a GGUF header, or is damaged.
	ErrGguf = errors.New("invalid GGUF header")
	// ErrNoWeights: the model, or the requested component, has no tensor layer.
	ErrNoWeights = errors.New("no tensor layer")
	// ErrWeights: the tensor layers of a model contradict each other, or one of them or a JSON file is invalid.
	ErrWeights = errors.New("invalid tensor layers")
	// ErrSafetensors: a header is not a safetensors header, or is damaged.
	ErrSafetensors = errors.New("invalid safetensors header")
	// ErrGroup: the name is that of a group of tensors.
	ErrGroup = errors.New("a group of tensors")
	// ErrRequestPrefix: Client.RequestPrefix has characters that are not allowed, or too many.
	ErrRequestPrefix = errors.New("invalid request prefix")
	// ErrSessionClosed: the model was closed by this program.
	ErrSessionClosed = errors.New("model closed")
)

// DaemonError is the daemon's error response.
type DaemonError struct {
	// Code is the kind of the error.
	Code Code
	// Message says what is wrong.
	Message string
	// Hint says what to do about it; it may be empty.
	Hint string
	// Request is the ID of the request that failed, under which the daemon's log has it; it may be empty.
	Request string
}

// Error is the message and the hint.
func (e *DaemonError) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + "; " + e.Hint
}

// CodeOf is the code of an error: the daemon's own if it is an error response.
func CodeOf(err error) Code {
	var daemon *DaemonError
	var known *failure
	switch {
	case errors.As(err, &daemon):
		return daemon.Code
	case errors.As(err, &known) && known.code != "":
		return known.code
	case errors.Is(err, ErrNoTensor), errors.Is(err, ErrNoLayer), errors.Is(err, ErrNoExpert),
		errors.Is(err, ErrNoWeights):
		return CodeNotFound
	case errors.Is(err, ErrGroup):
		return CodeInvalidRequest
	case errors.Is(err, ErrNotRunning), errors.Is(err, ErrUnavailable):
		return CodeUnavailable
	case errors.Is(err, ErrShort):
		return CodeCorrupt
	case errors.Is(err, ErrGguf), errors.Is(err, ErrSafetensors), errors.Is(err, ErrWeights):
		return CodeInvalidInput
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

// envelope is an error as responses and frames contain it.
type envelope struct {
	Code    *string `json:"code"`
	Message *string `json:"message"`
	Hint    string  `json:"hint"`
	Request string  `json:"request"`
}

// asError is the daemon's error; an unknown code becomes internal.
func (e *envelope) asError() error {
	if e == nil || e.Code == nil || e.Message == nil {
		return violated("error without code or message")
	}
	code := Code(*e.Code)
	if !codes[code] {
		code = CodeInternal
	}
	return &DaemonError{Code: code, Message: *e.Message, Hint: e.Hint, Request: e.Request}
}
