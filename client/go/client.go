package blobd

import (
	"errors"
	"io/fs"
	"net"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"
)

// SocketVariable is the environment variable that names the socket.
const SocketVariable = "BLOBD_SOCKET"

// Client sends requests to a daemon. Its zero value uses the default daemon. Every request makes its
// own connection and none is kept between requests, so goroutines can share a Client, and it stays
// valid after a restart of the daemon: open the model again then. It must not be copied, nor its fields
// changed, after its first request.
type Client struct {
	// Socket is the daemon's socket. If empty, the socket is the one that BLOBD_SOCKET names, or else the
	// system's, or else the first of this user's that accepts a connection. On a machine with a daemon for
	// all users, requests fail while that daemon does not accept connections of this user.
	Socket string
	// Timeout is how long to wait for the daemon to take or send the next bytes; if 0, there is no limit.
	Timeout time.Duration
	// RequestPrefix starts the ID of each request, such as the ID of a job in the program's own log; a
	// point and a number follow. The daemon's log and its audit log have these IDs. It has up to 43
	// letters, digits, `.`, `-` and `_`. If empty, the client chooses random digits.
	RequestPrefix string

	ids requestIDs
}

// Selection says which parts of a model to open. Its zero value is the whole model.
type Selection struct {
	// Component selects only the files with this role (model, projector, template, params, …);
	// one that the model lacks is an error.
	Component string
	// Prefix selects only the tensors whose name starts with it.
	Prefix string
	// Names selects only these tensors; one that the model lacks is an error. Nil selects all, an
	// empty slice none.
	Names []string
}

// Open opens a model at the default daemon, with all its tensors.
func Open(reference string) (*Model, error) {
	return (&Client{}).Open(reference)
}

// Open opens a model with all its tensors. The model is in use until it is closed. The error has
// CodeNotFound if there is no such model.
func (c *Client) Open(reference string) (*Model, error) {
	return c.OpenSelection(reference, Selection{})
}

// OpenSelection opens the selected parts of a model.
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
	model.client = c
	return model, nil
}

// Version describes the daemon.
func (c *Client) Version() (Version, error) {
	var version Version
	return version, c.query("/v1/version", &version)
}

// Models lists all models, sorted by name.
func (c *Client) Models() ([]ModelSummary, error) {
	var list ModelList
	err := c.query("/v1/models", &list)
	if err == nil && list.Models == nil {
		err = violated("response is not the JSON expected: no models")
	}
	return list.Models, err
}

// Model describes one model in full.
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
	return parse(body, into, "response")
}

func (c *Client) connect() (*wire, error) {
	id, err := c.ids.next(c.RequestPrefix)
	if err != nil {
		return nil, err
	}
	paths := DefaultSockets()
	if named := c.Socket; named != "" {
		paths = []string{named}
	} else if named := os.Getenv(SocketVariable); named != "" {
		paths = []string{named}
	}
	var refused error
	for _, path := range paths {
		conn, err := dial(path, c.Timeout)
		if err == nil {
			return newWire(conn, c.Timeout, id), nil
		}
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
			if evidence := evidenceOfService(path); evidence != "" {
				return nil, fail(ErrUnavailable, "blobd daemon: nothing listens on %s, although %s exists; "+
					"see `systemctl status blobd`, or name another socket in BLOBD_SOCKET", path, evidence)
			}
			continue
		}
		if refused == nil {
			refused = connectError(path, err)
		}
		if path == SystemSocket {
			break
		}
	}
	if refused != nil {
		return nil, refused
	}
	where := strings.Join(paths, " or ")
	return nil, fail(ErrNotRunning, "blobd daemon: nothing listens on %s; start it with `blobd serve`", where)
}

func dial(path string, timeout time.Duration) (*net.UnixConn, error) {
	if err := checkBeforeConnecting(path); err != nil {
		return nil, err
	}
	conn, err := net.DialTimeout("unix", path, timeout)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
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
	}
	if hint := connectHint(path, err); hint != "" {
		refused.text += "; " + hint
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
