package blobd

import (
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

// Component is the role of the file: model, projector, template, params, license, …
func (l Layer) Component() string { return component(l.MediaType) }

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
