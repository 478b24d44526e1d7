package blobd

import (
	"encoding/json"
	"math/bits"
	"strings"
)

// The daemon is not trusted: numbers that refer to each other are compared here once. Whether the
// files of the descriptors are long enough is checked when one is mapped.
const (
	maxLayers = 4096
	// A GGUF file has 131,072 tensors at most; a model may have several.
	maxTensors = 1 << 20
	// One descriptor per tensor, and some for headers and whole files.
	maxFds = maxTensors + 2*maxLayers
)

// Version describes the daemon and the store that it serves.
type Version struct {
	// Version is the daemon's version.
	Version string `json:"version"`
	// Protocol is the newest protocol version that it supports.
	Protocol uint32 `json:"protocol"`
	// Root is the directory of the store that it serves.
	Root string `json:"root"`
	// Pid is its process ID.
	Pid int `json:"pid"`
}

// ModelSummary is one model in the list of models.
type ModelSummary struct {
	// Name is the shortest name that is still unique.
	Name string `json:"name"`
	// Digest is the manifest's digest: the model's ID.
	Digest string `json:"digest"`
	// Size is the sum of its files in bytes, as if nothing were shared.
	Size uint64 `json:"size"`
	// Modified is when the tag was last set, RFC 3339 in UTC.
	Modified string `json:"modified"`
	// Pinned says whether it is protected from eviction and removal.
	Pinned bool `json:"pinned"`
	// Origin is where it was obtained from, if that is known.
	Origin string `json:"origin"`
	// Damage describes damaged parts; the other parts can be opened.
	Damage string `json:"damage"`
}

// ModelDetails describes one model in full.
type ModelDetails struct {
	// Name is the shortest name that is still unique.
	Name string `json:"name"`
	// Digest is the manifest's digest.
	Digest string `json:"digest"`
	// Architecture is general.architecture, if the model has it.
	Architecture string `json:"architecture"`
	// Parameters is the number of elements of all tensors.
	Parameters uint64 `json:"parameters"`
	// Quantization is the name of the file type, such as Q4_K_M.
	Quantization string `json:"quantization"`
	// Metadata is the GGUF metadata; a long array is given as its type and count.
	Metadata map[string]json.RawMessage `json:"metadata"`
	// Tensors are those of all layers, in file order.
	Tensors []TensorEntry `json:"tensors"`
}

// TensorEntry is a tensor as the store records it.
type TensorEntry struct {
	// Name is its name in its file.
	Name string `json:"name"`
	// Type is the name of its ggml type, such as Q4_K; of a tensor in safetensors, its element type or how it
	// is quantised, such as NVFP4.
	Type string `json:"type"`
	// Format is gguf or safetensors.
	Format string `json:"format"`
	// Shape has its dimensions: of GGUF the fastest first, of safetensors the slowest first.
	Shape []uint64 `json:"shape"`
	// Digest is the digest of the blob that holds it.
	Digest string `json:"digest"`
	// Offset is where its bytes start in the blob.
	Offset uint64 `json:"offset"`
	// Size is its length in bytes.
	Size uint64 `json:"size"`
}

// Layer is one file of an open model.
type Layer struct {
	// MediaType is its media type.
	MediaType string `json:"media_type"`
	// Digest is the digest of the whole file.
	Digest string `json:"digest"`
	// Size is its length in bytes.
	Size uint64 `json:"size"`
	// Name is its name in its source, if that gives one.
	Name string `json:"name"`
	// Fd is the number of the descriptor that is the whole file, if it is stored whole.
	Fd *uint64 `json:"fd"`
	// Header is the location of its GGUF header, if it is a split file.
	Header *Header `json:"header"`

	// PieceCount is how many pieces of it follow: 0, because this client does not request pieces.
	PieceCount uint64 `json:"piece_count"`
}

// Header locates the header of a split GGUF file: the first Size bytes of descriptor Fd.
type Header struct {
	// Fd is the descriptor's number.
	Fd uint64 `json:"fd"`
	// Size is the header's length with its padding, in bytes.
	Size uint64 `json:"size"`
}

// Component is the role of the file: model, projector, template, params, license, …
func (l Layer) Component() string { return component(l.MediaType) }

// Experts is the layout of a stack of experts: expert i is the Stride bytes from i*Stride on.
type Experts struct {
	// Count is the number of experts.
	Count uint64 `json:"count"`
	// Stride is the length of one expert in bytes.
	Stride uint64 `json:"stride"`
}

// Tensor describes a tensor of an open model and the location of its bytes. It is not mapped yet.
type Tensor struct {
	// Name is its name in its file.
	Name string `json:"name"`
	// Type is the name of its ggml type, such as Q4_K.
	Type string `json:"type"`
	// Shape has its dimensions in GGUF order, the fastest first.
	Shape []uint64 `json:"shape"`
	// Layer is the number of the file that contains it.
	Layer uint64 `json:"layer"`
	// Size is its length in bytes.
	Size uint64 `json:"size"`
	// Fd is the number of its descriptor; nil if it has no bytes.
	Fd *uint64 `json:"fd"`
	// Offset is where its bytes start in that descriptor's file.
	Offset uint64 `json:"offset"`
	// Experts is the layout of its experts, if it is a stack.
	Experts *Experts `json:"experts"`
}

// ExpertRange is the start and end of one expert in bytes from the tensor's start. It maps nothing.
// The error is ErrNoExpert if the tensor is not a stack or has no expert with this number.
func (t Tensor) ExpertRange(index uint64) (start, end uint64, err error) {
	if t.Experts == nil || index >= t.Experts.Count {
		var count uint64
		if t.Experts != nil {
			count = t.Experts.Count
		}
		return 0, 0, fail(ErrNoExpert, "tensor %s: no expert %d, it has %d", t.Name, index, count)
	}
	// The product of count and stride is the tensor's size, so these do not wrap.
	return index * t.Experts.Stride, (index + 1) * t.Experts.Stride, nil
}

// head is the first frame of the response to an open.
type head struct {
	Name        *string `json:"name"`
	Digest      *string `json:"digest"`
	Layers      []Layer `json:"layers"`
	TensorCount *uint64 `json:"tensor_count"`
	FdCount     *uint64 `json:"fd_count"`
}

func (h *head) check() error {
	if h.Name == nil || h.Digest == nil || h.TensorCount == nil || h.FdCount == nil {
		return violated("open frame lacks a name, a digest or a count")
	}
	for _, count := range []struct {
		what         string
		found, limit uint64
	}{
		{"layers", uint64(len(h.Layers)), maxLayers},
		{"tensors", *h.TensorCount, maxTensors},
		{"descriptors", *h.FdCount, maxFds},
	} {
		if count.found > count.limit {
			return violated("%d %s announced, at most %d allowed", count.found, count.what, count.limit)
		}
	}
	for number, layer := range h.Layers {
		if layer.Fd != nil && *layer.Fd >= *h.FdCount || layer.Header != nil && layer.Header.Fd >= *h.FdCount {
			return violated("layer %d: descriptor beyond the %d announced", number, *h.FdCount)
		}
		if layer.PieceCount != 0 {
			return violated("layer %d: pieces announced that were not requested", number)
		}
	}
	return nil
}

func (t *Tensor) check(h *head) error {
	problem := ""
	_, carry := bits.Add64(t.Offset, t.Size, 0)
	switch {
	case t.Layer >= uint64(len(h.Layers)):
		problem = "no such layer"
	case t.Fd != nil && *t.Fd >= *h.FdCount:
		problem = "descriptor beyond the number announced"
	case t.Fd == nil && t.Size > 0:
		problem = "bytes without a descriptor"
	case carry != 0:
		problem = "ends beyond 2^64"
	case t.Experts != nil && !t.Experts.addUpTo(t.Size):
		problem = "its experts do not add up to its size"
	default:
		return nil
	}
	return violated("tensor %q: %s", t.Name, problem)
}

func (e *Experts) addUpTo(size uint64) bool {
	high, low := bits.Mul64(e.Count, e.Stride)
	return high == 0 && low == size
}

const ollamaPrefix = "application/vnd.ollama.image."

var modelPackPrefixes = []string{"application/vnd.cncf.model.", "application/vnd.cnai.model."}

// component is the role of a file of this media type in its model.
func component(mediaType string) string {
	switch mediaType {
	case "application/vnd.docker.container.image.v1+json", "application/vnd.oci.image.config.v1+json",
		"application/vnd.oci.empty.v1+json", "application/vnd.docker.ai.model.config.v0.1+json",
		"application/vnd.docker.ai.model.config.v0.2+json", "application/vnd.docker.ai.model.config.v1+json":
		return "config"
	case "application/vnd.docker.ai.gguf.v3", "application/vnd.docker.ai.safetensors",
		"application/vnd.docker.ai.dduf", "application/vnd.docker.ai.model.file.v1+gguf":
		return "model"
	case "application/vnd.docker.ai.mmproj":
		return "projector"
	case "application/vnd.docker.ai.license":
		return "license"
	case "application/vnd.docker.ai.chat.template.jinja":
		return "template"
	case "application/vnd.docker.ai.model.file":
		return "file"
	}
	for _, prefix := range modelPackPrefixes {
		if rest, ok := strings.CutPrefix(mediaType, prefix); ok {
			kind, _, versioned := strings.Cut(rest, ".v1")
			if versioned && kind == "weight" {
				return "model"
			}
			return kind
		}
	}
	return strings.TrimPrefix(mediaType, ollamaPrefix)
}
