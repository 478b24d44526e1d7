package blobd

import (
	"net"
	"runtime"
	"sync"
	"syscall"
	"unicode/utf8"
)

// Model is an open model. It has received everything it needs; only TensorDigests sends another
// request to the daemon. It can be used by several goroutines.
type Model struct {
	head    head
	tensors []Tensor
	byName  map[string]int
	client  *Client

	mu     sync.Mutex
	closed bool
	blobs  []*blob
	lease  *net.UnixConn
}

// Name is the shortest name that was unique when the model was opened.
func (m *Model) Name() string { return *m.head.Name }

// Digest is the manifest's digest: the model's ID.
func (m *Model) Digest() string { return *m.head.Digest }

// Layers are the model's files, the configuration first. They must not be changed.
func (m *Model) Layers() []Layer { return m.head.Layers }

// Tensors are the selected tensors, layer by layer in file order. They must not be changed.
func (m *Model) Tensors() []Tensor { return m.tensors }

// Tensor is the tensor with this name. If several layers have one, such as a model and its draft
// model, it is the first; Tensors has all.
func (m *Model) Tensor(name string) (Tensor, error) {
	place, ok := m.byName[name]
	if !ok {
		return Tensor{}, fail(ErrNoTensor, "model %s: no tensor %q; Tensors lists those opened", m.Name(), name)
	}
	return m.tensors[place], nil
}

// Map maps the tensor with this name; see MapTensor.
func (m *Model) Map(name string) ([]byte, error) {
	tensor, err := m.Tensor(name)
	if err != nil {
		return nil, err
	}
	return m.MapTensor(tensor)
}

// MapTensor returns a tensor's bytes, without a copy. Tensors that share a blob share its mapping. The
// bytes are read-only: writing to them kills the program. They stay valid until Unmap, even after the
// model is closed.
func (m *Model) MapTensor(tensor Tensor) ([]byte, error) {
	return m.slice(tensor.Fd, tensor.Offset, tensor.Size)
}

// Expert maps one expert of a stack; see MapTensor. The error is ErrNoExpert if the tensor is not a
// stack or has no expert with this number.
func (m *Model) Expert(name string, index uint64) ([]byte, error) {
	tensor, err := m.Tensor(name)
	if err != nil {
		return nil, err
	}
	start, end, err := tensor.ExpertRange(index)
	if err != nil {
		return nil, err
	}
	return m.slice(tensor.Fd, tensor.Offset+start, end-start)
}

// Header is the header of the model's first split GGUF file: all bytes before its data section.
func (m *Model) Header() ([]byte, error) {
	for number, layer := range m.head.Layers {
		if layer.Header != nil {
			return m.LayerHeader(number)
		}
	}
	return nil, fail(ErrNoLayer, "model %s: no GGUF header; none of its files opened is a split GGUF file", m.Name())
}

// LayerHeader is the GGUF header of the layer with this number.
func (m *Model) LayerHeader(number int) ([]byte, error) {
	layer, err := m.described(number)
	if err != nil {
		return nil, err
	}
	if layer.Header == nil {
		return nil, fail(ErrNoLayer, "layer %d: no GGUF header; it is no split GGUF file", number)
	}
	return m.slice(&layer.Header.Fd, 0, layer.Header.Size)
}

// LayerBytes are the bytes of a layer that is stored whole: a template, parameters, a licence.
func (m *Model) LayerBytes(number int) ([]byte, error) {
	layer, err := m.layer(number)
	if err != nil {
		return nil, err
	}
	if layer.Fd == nil && layer.Size > 0 {
		return nil, fail(ErrNoLayer, "layer %d: stored in pieces; use `blobd export`", number)
	}
	return m.slice(layer.Fd, 0, layer.Size)
}

// Text is the text of the first layer with this role (template, params, license, …); found is false
// if there is none.
func (m *Model) Text(component string) (text string, found bool, err error) {
	for number, layer := range m.head.Layers {
		if layer.Component() != component {
			continue
		}
		bytes, err := m.LayerBytes(number)
		if err == nil && !utf8.Valid(bytes) {
			err = fail(ErrNoLayer, "layer %d: not UTF-8 text; use LayerBytes", number)
		}
		return string(bytes), true, err
	}
	return "", false, nil
}

// TensorDigests returns the digest of the blob that holds each tensor, by the tensor's name. It sends a
// request to the daemon. If several tensors have one name and different digests, the name is omitted.
func (m *Model) TensorDigests() (map[string]string, error) {
	// With the manifest's digest, so that a name that now belongs to another model is an error.
	details, err := m.client.Model(m.Name() + "@" + m.Digest())
	if err != nil {
		return nil, err
	}
	digests, clashing := map[string]string{}, map[string]bool{}
	for _, entry := range details.Tensors {
		known, again := digests[entry.Name]
		clashing[entry.Name] = clashing[entry.Name] || again && known != entry.Digest
		digests[entry.Name] = entry.Digest
	}
	for name := range digests {
		if _, opened := m.byName[name]; !opened || clashing[name] {
			delete(digests, name)
		}
	}
	return digests, nil
}

// Fd is the descriptor with this number in the tensor table, for an engine that does its own mapping
// or reading. It is close-on-exec and belongs to the model, which must stay open and referenced while
// it is used. The result is false if there is no such number, or if the descriptor is closed: when a
// model has more descriptors than half of what this process may have open, each is mapped on arrival
// and closed.
func (m *Model) Fd(number uint64) (int, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if number >= uint64(len(m.blobs)) || m.blobs[number].fd < 0 {
		return -1, false
	}
	return m.blobs[number].fd, true
}

// Close ends the lease and closes the descriptors. Mappings stay valid. It can be called twice. The
// garbage collector closes a model that is no longer referenced.
func (m *Model) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	runtime.SetFinalizer(m, nil)
	for _, blob := range m.blobs {
		blob.close()
	}
	return m.lease.Close()
}

// Unmap closes the model and unmaps its memory. Its slices must not be used afterwards: that kills
// the program. Without Unmap, mappings last as long as the program; they use addresses, but no memory
// that the system cannot reclaim.
func (m *Model) Unmap() error {
	err := m.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, blob := range m.blobs {
		if unmapped := blob.unmap(); err == nil {
			err = unmapped
		}
	}
	return err
}

func (m *Model) slice(fd *uint64, offset, size uint64) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, fail(ErrSessionClosed, "model %s: closed; open it again", m.Name())
	}
	if fd == nil || size == 0 {
		return []byte{}, nil
	}
	if *fd >= uint64(len(m.blobs)) {
		return nil, fail(ErrMap, "descriptor %d: no such descriptor, the model has %d", *fd, len(m.blobs))
	}
	return m.blobs[*fd].slice(offset, size)
}

func (m *Model) layer(number int) (Layer, error) {
	if number < 0 || number >= len(m.head.Layers) {
		return Layer{}, fail(ErrNoLayer, "layer %d: no such layer, the model has %d", number, len(m.head.Layers))
	}
	return m.head.Layers[number], nil
}

// described is the layer that has the header of this layer's file: the first with the same digest. A manifest may
// name a file several times, and the daemon describes it once.
func (m *Model) described(number int) (Layer, error) {
	wanted, err := m.layer(number)
	if err != nil || wanted.Header != nil {
		return wanted, err
	}
	for _, layer := range m.head.Layers {
		if layer.Digest == wanted.Digest {
			return layer, nil
		}
	}
	return wanted, nil
}

// receive requests a model and receives the whole response; the connection becomes the lease.
func receive(w *wire, params map[string]any) (*Model, error) {
	if err := w.upgrade("/v1/open", params); err != nil {
		return nil, err
	}
	content, err := w.frame("open")
	if err != nil {
		return nil, err
	}
	model := &Model{lease: w.conn}
	if err := parse(content, &model.head, "open"); err != nil {
		return nil, err
	}
	if err := model.head.check(); err != nil {
		return nil, err
	}
	if model.tensors, err = receiveTensors(w, &model.head); err != nil {
		return nil, err
	}
	model.byName = make(map[string]int, len(model.tensors))
	for place, tensor := range model.tensors {
		if _, known := model.byName[tensor.Name]; !known {
			model.byName[tensor.Name] = place
		}
	}
	if model.blobs, err = receiveBlobs(w, *model.head.FdCount); err != nil {
		return nil, err
	}
	closeAll(w.fds) // Unexpected descriptors.
	runtime.SetFinalizer(model, func(m *Model) { m.Close() })
	return model, nil
}

func receiveTensors(w *wire, head *head) ([]Tensor, error) {
	var tensors []Tensor
	for uint64(len(tensors)) < *head.TensorCount {
		content, err := w.frame("tensors")
		if err != nil {
			return nil, err
		}
		var part []Tensor
		if err := parse(content, &part, "tensors"); err != nil {
			return nil, err
		}
		// A part is never empty, so the loop ends.
		left := *head.TensorCount - uint64(len(tensors))
		if len(part) == 0 || uint64(len(part)) > left {
			return nil, violated("tensors in one frame: expected 1 to %d, found %d", left, len(part))
		}
		for place := range part {
			if err := part[place].check(head); err != nil {
				return nil, err
			}
		}
		tensors = append(tensors, part...)
	}
	return tensors, nil
}

func receiveBlobs(w *wire, fdCount uint64) (blobs []*blob, err error) {
	keepOpen := fdCount <= maxOpenFiles()/2
	defer func() {
		if err != nil {
			for _, blob := range blobs {
				blob.close()
				blob.unmap()
			}
			blobs = nil
		}
	}()
	for uint64(len(blobs)) < fdCount {
		fds, err := w.batch(uint64(len(blobs)), fdCount)
		if err != nil {
			return blobs, err
		}
		for _, fd := range fds {
			blobs = append(blobs, &blob{number: len(blobs), fd: fd})
		}
		if keepOpen {
			continue
		}
		for _, blob := range blobs[len(blobs)-len(fds):] {
			err := blob.mapWhole()
			blob.close()
			if err != nil {
				return blobs, err
			}
		}
	}
	return blobs, nil
}

func maxOpenFiles() uint64 {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return limit.Cur
}
