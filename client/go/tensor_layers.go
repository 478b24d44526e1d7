package blobd

import (
	"sort"
	"strings"
)

// maxManifestTensors limits the tensors of a model, including parts. Layers that refer to the same file many times
// can declare any number of them.
const maxManifestTensors = 1 << 18

// parts are the suffixes of the parts of a quantised tensor: in a file, and in this package.
var parts = [][2]string{{".scale", "_scale"}, {".bias", "_qbias"}, {".global_scale", "_global_scale"}}

// legacyKey is the name of the only tensor in a file of January 2026.
const legacyKey = "data"

// tensorLayers has the tensors and groups in the headers of a model's layers, or of those of one component. The
// rules are those of Ollama and of blobd's Rust client.
type tensorLayers struct {
	component string
	tensors   map[string]*Weight
	groups    map[string][]string
	// declared by the first file that declares a type; if none does, by the first that declares a size.
	declared Quantization
}

// layerFile is the header of a layer's file.
type layerFile struct {
	*safetensorsHeader
	layer  string
	number int
}

func (l *tensorLayers) includes(layer string) bool {
	return l.component == "" || strings.HasPrefix(layer, l.component+"/")
}

// add adds the tensors of a layer; the number is that of the layer with its file.
func (l *tensorLayers) add(file layerFile) error {
	if l.declared.Type == "" {
		if found := declared(file.safetensorsHeader, ""); found.Type != "" || l.declared.GroupSize == 0 {
			l.declared = found
		}
	}
	key, found := l.tensorKey(file)
	if !found {
		return l.addGroup(file)
	}
	name := stripComponent(file.layer, l.component)
	err := l.addTensor(file, key, name)
	for _, part := range parts {
		// A bias without a scale is a tensor of its own.
		if err == nil && !file.hasScale(key) {
			err = l.insert(file, key+part[0], name+part[0], false)
		}
	}
	return err
}

// tensorKey is the name in the file of the tensor that the layer is named after; false for a group.
func (l *tensorLayers) tensorKey(file layerFile) (string, bool) {
	keys := []string{stripComponent(file.layer, l.component), file.layer}
	// Even if all components are open, the names in a file may lack their component.
	if _, rest, found := strings.Cut(file.layer, "/"); found {
		keys = append(keys, rest)
	}
	for _, key := range append(keys, legacyKey) {
		if file.tensor(key) != nil {
			return key, true
		}
	}
	return "", false
}

func (l *tensorLayers) addTensor(file layerFile, key, name string) error {
	if file.hasScale(key) {
		for _, part := range parts {
			if err := l.insert(file, key+part[0], name+part[1], true); err != nil {
				return err
			}
		}
	}
	return l.insert(file, key, name, false)
}

func (l *tensorLayers) addGroup(file layerFile) error {
	members := []string{}
	for _, tensor := range file.tensors {
		if file.isPart(tensor.name) {
			continue
		}
		name := l.memberName(tensor.name, file.layer)
		if err := l.addTensor(file, tensor.name, name); err != nil {
			return err
		}
		members = append(members, name)
	}
	l.groups[stripComponent(file.layer, l.component)] = members
	return nil
}

func (l *tensorLayers) memberName(key, layer string) string {
	component, _, found := strings.Cut(layer, "/")
	if l.component == "" && found && component != "" {
		return component + "/" + stripComponent(key, component)
	}
	return stripComponent(key, l.component)
}

func (l *tensorLayers) insert(file layerFile, key, name string, isPart bool) error {
	tensor := file.tensor(key)
	if tensor == nil {
		return nil
	}
	if len(l.tensors) >= maxManifestTensors {
		return fail(ErrWeights, "model: more than %d tensors in its layers", maxManifestTensors)
	}
	if known := l.tensors[name]; known != nil {
		return fail(ErrWeights, "tensor %q: in layer %q and in layer %q", name, known.layerName, file.layer)
	}
	l.tensors[name] = &Weight{
		Name:      name,
		Dtype:     tensor.dtype,
		Shape:     tensor.shape,
		Size:      tensor.size,
		Layer:     file.number,
		Offset:    tensor.offset,
		layerName: file.layer,
		declared:  declaredFor(file.safetensorsHeader, tensor.name),
		isPart:    isPart,
	}
	return nil
}

func (l *tensorLayers) isPart(name string) bool {
	if tensor := l.tensors[name]; tensor != nil && tensor.isPart {
		return true
	}
	for _, part := range parts {
		base, found := strings.CutSuffix(name, part[1])
		if found && l.tensors[base] != nil && l.tensors[base+"_scale"] != nil {
			return true
		}
	}
	return false
}

// quantization is how the model is quantised; index is what model_index.json says. Type and size always come from
// one source.
func (l *tensorLayers) quantization(index Quantization) Quantization {
	if l.declared.Type != "" {
		return l.declared.orDefaultSize()
	}
	if index.bits() > 0 {
		return index.orDefaultSize()
	}
	if inferred := l.inferFromSeparateScales(); inferred != "" {
		found := Quantization{Type: inferred}
		if index.Type == "" {
			found.GroupSize = index.GroupSize
		}
		return found.orDefaultSize()
	}
	if index.Type == "" && l.declared.GroupSize > 0 {
		return l.declared
	}
	return index.orDefaultSize()
}

// quantizationOf is how a tensor is quantised; false if it has no scale. model is how the model is quantised.
func (l *tensorLayers) quantizationOf(name string, model Quantization) (Quantization, bool) {
	tensor, scale := l.tensors[name], l.tensors[name+"_scale"]
	if tensor == nil || scale == nil {
		return Quantization{}, false
	}
	found := tensor.declared
	if found.Type == "" {
		inferred := inferQuantization(tensor, scale, l.tensors[name+"_qbias"] != nil, model)
		if inferred.Type != "" {
			return inferred, true
		}
		return found, true
	}
	if found.GroupSize == 0 && !found.hasFixedSize() && found.bits() > 0 {
		found.GroupSize = groupSize(tensor, scale, found.bits())
	}
	return found.orDefaultSize(), true
}

// inferFromSeparateScales infers the model's quantisation from the first scale in a layer of its own, as Ollama did
// in February 2026: without a bias, a type with block scales; otherwise by the ratio of the sizes of weight and scale.
func (l *tensorLayers) inferFromSeparateScales() string {
	for _, name := range sortedKeys(l.tensors) {
		base, found := strings.CutSuffix(name, "_scale")
		weight, scale := l.tensors[base], l.tensors[name]
		if !found || weight == nil || weight.layerName == scale.layerName {
			continue
		}
		switch {
		case scale.Size == 0:
			return ""
		case l.tensors[base+"_qbias"] == nil:
			if block := inferBlockScales(weight, scale).Type; block != "" {
				return strings.ToUpper(block)
			}
			return "NVFP4"
		case weight.Size/scale.Size < 12:
			return "Q4"
		}
		return "Q8"
	}
	return ""
}

func (f layerFile) hasScale(key string) bool { return f.tensor(key+".scale") != nil }

// isPart says whether a tensor is a part of another one in the file. A part has no parts: T.scale.scale is a tensor
// of its own.
func (f layerFile) isPart(name string) bool {
	isPart := false
	for whole, found := f.wholeOf(name); found; whole, found = f.wholeOf(whole) {
		isPart = !isPart
	}
	return isPart
}

// wholeOf returns T for T.bias, if the file has T and T.scale.
func (f layerFile) wholeOf(name string) (string, bool) {
	for _, part := range parts {
		whole, found := strings.CutSuffix(name, part[0])
		if found && f.tensor(whole) != nil && f.hasScale(whole) {
			return whole, true
		}
	}
	return "", false
}

// stripComponent is the name without the component, if it starts with it.
func stripComponent(name, component string) string {
	if component == "" {
		return name
	}
	return strings.TrimPrefix(name, component+"/")
}

func sortedKeys[V any](values map[string]V) []string {
	keys := make([]string, 0, len(values))
	for key := range values {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	return keys
}
