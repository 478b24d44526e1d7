package blobd

import (
	"encoding/json"
	"math/bits"
	"strings"
)

// The daemon is not believed: numbers that refer to each other are compared here once. What remains
// to be checked is whether the files behind the descriptors are long enough, when one is mapped.
const (
	maxLayers = 4096
	// A GGUF file has 131,072 tensors at most; a model may have several.
	maxTensors = 1 << 20
	// One descriptor per tensor, and some for headers and whole files.
	maxFds = maxTensors + 2*maxLayers
)

// Version says what the daemon is and which store it serves.
type Version struct {
	// Version is the daemon's.
	Version string `json:"version"`
	// Protocol is the newest protocol that it speaks.
	Protocol uint32 `json:"protocol"`
	// Root is the store that it serves.
	Root string `json:"root"`
	// Pid is its process.
	Pid int `json:"pid"`
}

// ModelSummary is one model in the list of those there are.
type ModelSummary struct {
	// Name is the shortest name that is still unique.
	Name string `json:"name"`
	// Digest is the manifest's digest: the model's ID.
	Digest string `json:"digest"`
	// Size is what its files add up to, in bytes, as if nothing were shared.
	Size uint64 `json:"size"`
	// Modified is when the tag was last set, RFC 3339 in UTC.
	Modified string `json:"modified"`
	// Pinned says whether eviction leaves it alone.
	Pinned bool `json:"pinned"`
	// Origin is where it came from, if that is known.
	Origin string `json:"origin"`
	// Damage is what is wrong with it; what is not damaged can be opened.
	Damage string `json:"damage"`
}

// ModelDetails is one model in depth.
type ModelDetails struct {
	// Name is the shortest name that is still unique.
	Name string `json:"name"`
	// Digest is the manifest's.
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
	// Type is the name of its ggml type, such as Q4_K.
	Type string `json:"type"`
	// Shape has its dimensions in GGUF order, the fastest first.
	Shape []uint64 `json:"shape"`
	// Digest is that of the blob that holds it.
	Digest string `json:"digest"`
	// Offset is where in the blob its bytes start.
	Offset uint64 `json:"offset"`
	// Size is how many bytes it has.
	Size uint64 `json:"size"`
}

// Layer is one file of an open model.
type Layer struct {
	// MediaType is what it is.
	MediaType string `json:"media_type"`
	// Digest is that of the whole file.
	Digest string `json:"digest"`
	// Size is its length in bytes.
	Size uint64 `json:"size"`
	// Name is what it is called where it comes from, if that says.
	Name string `json:"name"`
	// Fd is the number of the descriptor that is the whole file, if it is stored whole.
	Fd *uint64 `json:"fd"`
	// Header is where its GGUF header is, if it is a split file.
	Header *Header `json:"header"`

	// PieceCount is how many pieces of it are to come; none, as nobody asks for them here.
	PieceCount uint64 `json:"piece_count"`
}

// Header is where the header of a split GGUF file is: the first Size bytes behind descriptor Fd.
type Header struct {
	// Fd is the descriptor's number.
	Fd uint64 `json:"fd"`
	// Size is the header's length with its padding, in bytes.
	Size uint64 `json:"size"`
}

// Component is the part that the file plays: model, projector, template, params, license, …
func (l Layer) Component() string { return component(l.MediaType) }

// Experts says how the experts of a stack lie: expert i is the Stride bytes from i*Stride on.
type Experts struct {
	// Count is how many there are.
	Count uint64 `json:"count"`
	// Stride is the length of one in bytes.
	Stride uint64 `json:"stride"`
}

// Tensor says what a tensor of an open model is and where its bytes are. Nothing is mapped for it.
type Tensor struct {
	// Name is its name in its file.
	Name string `json:"name"`
	// Type is the name of its ggml type, such as Q4_K.
	Type string `json:"type"`
	// Shape has its dimensions in GGUF order, the fastest first.
	Shape []uint64 `json:"shape"`
	// Layer is the number of the file that it is in.
	Layer uint64 `json:"layer"`
	// Size is how many bytes it has.
	Size uint64 `json:"size"`
	// Fd is the number of its descriptor; nil if it has no bytes.
	Fd *uint64 `json:"fd"`
	// Offset is where its bytes start, behind that descriptor.
	Offset uint64 `json:"offset"`
	// Experts says how to find each expert, if it is a stack of them.
	Experts *Experts `json:"experts"`
}

// ExpertRange is the start and end of one expert in bytes from the tensor's start, without mapping
// anything. The error is ErrNoExpert if the tensor is no stack or has not that many.
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

// head is the first frame of an open answer.
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
			return violated("layer %d: descriptor beyond the %d promised", number, *h.FdCount)
		}
		if layer.PieceCount != 0 {
			return violated("layer %d: pieces announced that nobody asked for", number)
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
		problem = "descriptor beyond the number promised"
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

// component is the part that a file of this media type plays in its model.
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
