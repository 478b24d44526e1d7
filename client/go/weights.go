package blobd

import (
	"encoding/json"
	"fmt"
	"sort"
	"strings"
	"unicode/utf8"
)

// maxJSONBytes limits the JSON files that are read. Tokenizers are the longest of a model, at about 35 MiB.
const maxJSONBytes = 128 << 20

// ManifestWeights has the tensors of an open model that has one safetensors file per tensor, or per group of
// experts, such as Ollama's models for image generation and for MLX, or those of one component of it. It reads all
// forms of these files that Ollama has written.
//
// The names of a component's tensors do not contain the component; if none is requested, names start with their
// component, as in text_encoder/model.norm.weight. The parts of a quantised tensor T are T_scale, T_qbias and
// T_global_scale.
type ManifestWeights struct {
	model        *Model
	layers       tensorLayers
	files        map[int][]byte
	quantization Quantization
}

// Weight is one tensor, or a part of a quantised one. It is not mapped yet.
type Weight struct {
	// Name is its name among the opened tensors.
	Name string
	// Dtype is the name of its element type in the file, such as BF16; that of packed elements is U32.
	Dtype string
	// Shape has its dimensions in the file, the slowest first; a scalar has none.
	Shape []uint64
	// Size is its length in bytes.
	Size uint64
	// Layer is the number of the layer whose file contains it.
	Layer int
	// Offset is where it starts in that file.
	Offset uint64

	layerName string
	// declared by its file for it.
	declared Quantization
	// isPart is true for a scale or bias in the file of its tensor.
	isPart bool
}

// OpenWeights opens the tensors of a model, or those of one component, such as transformer or text_encoder. An
// empty component means the whole model. The daemon passes no descriptors for other tensors.
func (c *Client) OpenWeights(reference, component string) (*ManifestWeights, error) {
	selection := Selection{}
	if component = strings.TrimRight(component, "/"); component != "" {
		selection.Prefix = component + "/"
	}
	model, err := c.OpenSelection(reference, selection)
	if err != nil {
		return nil, err
	}
	weights, err := NewManifestWeights(model, component)
	if err != nil {
		model.Close()
	}
	return weights, err
}

// NewManifestWeights finds the tensors of a model that is already open. The error is ErrNoWeights if the model, or
// the component, has no tensor layer, and ErrWeights if one of them is not a valid safetensors file.
func NewManifestWeights(model *Model, component string) (*ManifestWeights, error) {
	w := &ManifestWeights{model: model, files: map[int][]byte{}, layers: tensorLayers{
		component: strings.TrimRight(component, "/"), tensors: map[string]*Weight{}, groups: map[string][]string{},
	}}
	if err := w.readLayers(); err != nil {
		return nil, err
	}
	var index json.RawMessage
	if _, err := w.JSON("model_index.json", &index); err != nil {
		return nil, err
	}
	w.quantization = w.layers.quantization(quantizationOfIndex(index))
	w.quantization.Type = strings.ToUpper(w.quantization.Type)
	return w, nil
}

// Names are the sorted names of tensors, their parts and groups.
func (w *ManifestWeights) Names() []string {
	names := sortedKeys(w.layers.tensors)
	for name := range w.layers.groups {
		if w.layers.tensors[name] == nil {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names
}

// Has says whether there is a tensor, a part or a group with this name.
func (w *ManifestWeights) Has(name string) bool {
	_, isGroup := w.layers.groups[name]
	return isGroup || w.layers.tensors[name] != nil
}

// Group has the names of a group's tensors, in the order of its file; found is false if there is no such group.
// They must not be changed.
func (w *ManifestWeights) Group(name string) (members []string, found bool) {
	members, found = w.layers.groups[name]
	return members, found
}

// Tensor is the tensor or part with this name. It maps nothing. The error is ErrNoTensor, or ErrGroup for the name
// of a group.
func (w *ManifestWeights) Tensor(name string) (Weight, error) {
	if tensor := w.layers.tensors[name]; tensor != nil {
		return *tensor, nil
	}
	members, isGroup := w.layers.groups[name]
	if !isGroup {
		return Weight{}, fail(ErrNoTensor, "model %s: no tensor %q; ManifestWeights.Names lists its tensors",
			w.model.Name(), name)
	}
	example := ""
	if len(members) > 0 {
		example = fmt.Sprintf(", such as %q", members[0])
	}
	return Weight{}, fail(ErrGroup, "%q is a group of tensors; request one of them%s", name, example)
}

// Map returns the bytes of the tensor with this name, as they are stored, without a copy. They are read-only, and
// valid until the model's Unmap.
func (w *ManifestWeights) Map(name string) ([]byte, error) {
	tensor, err := w.Tensor(name)
	if err != nil {
		return nil, err
	}
	end := tensor.Offset + tensor.Size
	return w.files[tensor.Layer][tensor.Offset:end:end], nil
}

// Expert returns one element of the slowest dimension, such as an expert of a stack; see Map. The error is
// ErrNoExpert if there is none with this number.
func (w *ManifestWeights) Expert(name string, index uint64) ([]byte, error) {
	tensor, err := w.Tensor(name)
	if err != nil {
		return nil, err
	}
	if len(tensor.Shape) == 0 || index >= tensor.Shape[0] {
		return nil, fail(ErrNoExpert, "tensor %s: no expert %d in shape %d", name, index, tensor.Shape)
	}
	data, err := w.Map(name)
	stride := tensor.Size / tensor.Shape[0]
	return data[index*stride : (index+1)*stride : (index+1)*stride], err
}

// Quantization is how the model is quantised, with the type in capital letters (INT4, NVFP4, Q8, …): as the first
// file that declares it says, else as model_index.json says, else as inferred from scales in separate layers.
func (w *ManifestWeights) Quantization() Quantization { return w.quantization }

// QuantizationOf is how this tensor is quantised; false if it has no scale and is therefore not quantised.
//
// In order of precedence: what its file declares for this tensor, what the file declares for all its tensors, what
// the shapes and types of the tensor and its scale imply, the type's default size.
func (w *ManifestWeights) QuantizationOf(name string) (Quantization, bool) {
	return w.layers.quantizationOf(name, w.quantization)
}

// IsPart says whether this is a scale or bias of another tensor.
func (w *ManifestWeights) IsPart(name string) bool { return w.layers.isPart(name) }

// Component is the requested component; empty for all.
func (w *ManifestWeights) Component() string { return w.layers.component }

// Components are the sorted names of the model's components, whichever is requested.
func (w *ManifestWeights) Components() []string {
	components := map[string]bool{}
	for _, layer := range w.model.Layers() {
		if name, _, found := strings.Cut(layer.Name, "/"); found && layer.Component() == "tensor" {
			components[name] = true
		}
	}
	return sortedKeys(components)
}

// Model is the open model, with its lease and its other files.
func (w *ManifestWeights) Model() *Model { return w.model }

// Close closes the model. Mappings stay valid until its Unmap.
func (w *ManifestWeights) Close() error { return w.model.Close() }

// JSON reads a JSON file of the model by its path, such as tokenizer/tokenizer_config.json; found is false if the
// model has no such file.
func (w *ManifestWeights) JSON(path string, into any) (found bool, err error) {
	for number, layer := range w.model.Layers() {
		if layer.Component() != "json" || layer.Name != path {
			continue
		}
		text, err := w.model.LayerBytes(number)
		switch {
		case err != nil:
			return true, err
		case len(text) > maxJSONBytes:
			return true, fail(ErrWeights, "file %q: too long: expected at most %d bytes, found %d",
				path, maxJSONBytes, len(text))
		case !utf8.Valid(text):
			return true, fail(ErrWeights, "file %q: not UTF-8", path)
		}
		if err := json.Unmarshal(text, into); err != nil {
			return true, fail(ErrWeights, "file %q: %v", path, err)
		}
		return true, nil
	}
	return false, nil
}

// readLayers reads the headers of all tensor layers of the component, each file once.
func (w *ManifestWeights) readLayers() error {
	files := map[string]layerFile{}
	for number, layer := range w.model.Layers() {
		if layer.Name == "" || layer.Component() != "tensor" || !w.layers.includes(layer.Name) {
			continue
		}
		file, known := files[layer.Digest]
		if !known {
			header, err := w.readHeader(number, layer.Name)
			if err != nil {
				return err
			}
			file = layerFile{safetensorsHeader: header, number: number}
			files[layer.Digest] = file
		}
		file.layer = layer.Name
		if err := w.layers.add(file); err != nil {
			return err
		}
	}
	if len(w.layers.tensors) > 0 {
		return nil
	}
	component, hint := "", "if it is a GGUF model, open it with Client.Open"
	if w.layers.component != "" {
		component = fmt.Sprintf(" of component %q", w.layers.component)
		hint = "open the model without a component to see its components"
	}
	return fail(ErrNoWeights, "model %s: no layer is a tensor%s; %s", w.model.Name(), component, hint)
}

func (w *ManifestWeights) readHeader(number int, name string) (*safetensorsHeader, error) {
	file, err := w.model.LayerBytes(number)
	if err != nil {
		return nil, err
	}
	w.files[number] = file
	header, err := parseSafetensors(file)
	if err == nil {
		err = header.checkPrintable()
	}
	if err != nil {
		return nil, &failure{kind: ErrWeights, cause: err, text: fmt.Sprintf("layer %q: %v; run `blobd verify`", name, err)}
	}
	return header, nil
}
