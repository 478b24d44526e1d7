package blobd

import (
	"errors"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// SocketVariable is the environment variable that names the socket.
const SocketVariable = "BLOBD_SOCKET"

// SystemSocket is the socket of the system's daemon.
const SystemSocket = "/run/blobd/blobd.sock"

// Client is a daemon that can be asked. Its zero value is the default daemon. Every request is a
// connection of its own and nothing is kept between them, so a Client can be shared by goroutines
// and outlives a restart of the daemon: after one, just open the model again.
type Client struct {
	// Socket is where the daemon listens. If empty, what BLOBD_SOCKET names, or else the first of
	// DefaultSockets that can be reached.
	Socket string
	// Timeout is how long to wait for the daemon to take or send the next bytes; if 0, for ever.
	Timeout time.Duration
}

// Selection says what of a model to open. Its zero value is everything.
type Selection struct {
	// Component keeps only the files that play this part (model, projector, template, params, …);
	// one that the model lacks is an error.
	Component string
	// Prefix keeps only the tensors whose name starts so.
	Prefix string
	// Names keeps only these tensors; one that the model lacks is an error. Empty but not nil, none.
	Names []string
}

// Open opens a model at the default daemon, with all its tensors.
func Open(reference string) (*Model, error) {
	return (&Client{}).Open(reference)
}

// Open opens a model with all its tensors; it is in use until it is closed. The error has
// CodeNotFound if there is no such model.
func (c *Client) Open(reference string) (*Model, error) {
	return c.OpenSelection(reference, Selection{})
}

// OpenSelection opens some of a model.
func (c *Client) OpenSelection(reference string, selection Selection) (*Model, error) {
	params, err := openParams(reference, selection)
	if err != nil {
		return nil, err
	}
	w, err := c.connect()
	if err != nil {
		return nil, err
	}
	model, err := receive(w, params)
	if err != nil {
		w.close()
		return nil, err
	}
	model.client = *c
	return model, nil
}

// Version says what the daemon is.
func (c *Client) Version() (Version, error) {
	var version Version
	return version, c.query("/v1/version", &version)
}

// Models lists the models there are, by name.
func (c *Client) Models() ([]ModelSummary, error) {
	var list struct {
		Models []ModelSummary `json:"models"`
	}
	err := c.query("/v1/models", &list)
	if err == nil && list.Models == nil {
		err = violated("answer is not the JSON expected: no models")
	}
	return list.Models, err
}

// Model is one model in depth.
func (c *Client) Model(reference string) (ModelDetails, error) {
	var details ModelDetails
	path := url.URL{Path: reference}
	return details, c.query("/v1/models/"+path.EscapedPath(), &details)
}

func (c *Client) query(path string, into any) error {
	w, err := c.connect()
	if err != nil {
		return err
	}
	defer w.close()
	body, err := w.query(path)
	if err != nil {
		return err
	}
	return parse(body, into, "answer")
}

func (c *Client) connect() (*wire, error) {
	paths := DefaultSockets()
	if named := c.Socket; named != "" {
		paths = []string{named}
	} else if named := os.Getenv(SocketVariable); named != "" {
		paths = []string{named}
	}
	var refused error
	for _, path := range paths {
		conn, err := net.DialTimeout("unix", path, c.Timeout)
		if err == nil {
			return newWire(conn.(*net.UnixConn), c.Timeout), nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) && refused == nil {
			refused = connectError(path, err)
		}
	}
	if refused != nil {
		return nil, refused
	}
	where := strings.Join(paths, " or ")
	return nil, fail(ErrNotRunning, "blobd daemon: nothing listens on %s; start it with `blobd serve`", where)
}

// DefaultSockets are the sockets tried when none is named, in this order: the system's, then the
// user's.
func DefaultSockets() []string {
	sockets := []string{SystemSocket}
	if runtime := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(runtime) {
		sockets = append(sockets, filepath.Join(runtime, "blobd/blobd.sock"))
	}
	return sockets
}

func connectError(path string, err error) error {
	refused := &failure{kind: ErrConnect, cause: err, code: CodeInternal}
	var reason *net.OpError
	if errors.As(err, &reason) {
		err = reason.Err
	}
	refused.text = "blobd daemon: cannot connect to " + path + ": " + err.Error()
	if errors.Is(err, fs.ErrPermission) {
		refused.code = CodeDenied
		refused.text += "; join the group that the socket belongs to"
	}
	return refused
}

func openParams(reference string, selection Selection) (map[string]any, error) {
	params := map[string]any{"reference": reference, "tensors": "all"}
	switch {
	case selection.Prefix != "" && selection.Names != nil:
		return nil, &failure{
			kind: ErrNoTensor,
			text: "tensors: prefix and names exclude each other; give one",
			code: CodeInvalidRequest,
		}
	case selection.Prefix != "":
		params["tensors"] = map[string]any{"prefix": selection.Prefix}
	case len(selection.Names) > 0:
		params["tensors"] = map[string]any{"names": selection.Names}
	case selection.Names != nil:
		params["tensors"] = "none"
	}
	if selection.Component != "" {
		params["component"] = selection.Component
	}
	return params, nil
}
