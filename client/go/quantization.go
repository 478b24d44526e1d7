package blobd

import (
	"encoding/json"
	"math/bits"
	"strconv"
	"strings"
)

// Quantization is how a tensor or a model is quantised, as far as it is known.
type Quantization struct {
	// Type is int4, int8, nvfp4, mxfp4, mxfp8, …; empty if unknown.
	Type string
	// GroupSize is how many elements of a row share a scale; 0 if unknown.
	GroupSize uint32
}

// quantTypes has the bits of an element and the default group size of each type. The group size of types with
// block scales (nv…, mx…) is fixed.
var quantTypes = map[string]struct {
	bits uint64
	size uint32
}{
	"int4": {4, 64}, "int8": {8, 64}, "nvfp4": {4, 16}, "mxfp4": {4, 32}, "mxfp8": {8, 32},
	"q4": {4, 64}, "q8": {8, 64}, "fp4": {4, 64}, "fp8": {8, 64},
}

var quantAliases = map[string]string{"q4": "int4", "fp4": "int4", "q8": "int8", "fp8": "int8"}

// packedTypes are those in which quantised elements are packed.
var packedTypes = map[string]bool{"U8": true, "I8": true, "U16": true, "U32": true, "I32": true, "U64": true}

// bits of a packed element; 0 if the type is unknown.
func (q Quantization) bits() uint64 { return quantTypes[lowerASCII(q.Type)].bits }

func (q Quantization) hasFixedSize() bool {
	name := lowerASCII(q.Type)
	return q.bits() > 0 && (strings.HasPrefix(name, "nv") || strings.HasPrefix(name, "mx"))
}

func (q Quantization) orDefaultSize() Quantization {
	if q.GroupSize == 0 {
		q.GroupSize = quantTypes[lowerASCII(q.Type)].size
	}
	return q
}

// declared is what a file declares for all its tensors, or with a prefix for one.
func declared(header *safetensorsHeader, prefix string) Quantization {
	return Quantization{header.metadata[prefix+"quant_type"], parseSize(header.metadata[prefix+"group_size"])}
}

// declaredFor is what a file declares for a tensor; if nothing, what it declares for all. The size for all is not
// that of a tensor that has another type.
func declaredFor(header *safetensorsHeader, name string) Quantization {
	own, all := declared(header, name+"."), declared(header, "")
	isOther := own.Type != "" && all.Type != "" && !isSameType(own.Type, all.Type)
	if own.GroupSize == 0 && !isOther {
		own.GroupSize = all.GroupSize
	}
	if own.Type == "" {
		own.Type = all.Type
	}
	return own
}

// quantizationOfIndex is what model_index.json says about the model. A value of another type counts as missing.
func quantizationOfIndex(text []byte) (found Quantization) {
	// Fields of a struct would also match keys in other letter case.
	var fields map[string]json.RawMessage
	if json.Unmarshal(text, &fields) != nil {
		return found
	}
	if json.Unmarshal(fields["quantization"], &found.Type) != nil {
		found.Type = ""
	}
	var size string
	if json.Unmarshal(fields["group_size"], &size) == nil {
		found.GroupSize = parseSize(size)
	} else if json.Unmarshal(fields["group_size"], &found.GroupSize) != nil {
		found.GroupSize = 0
	}
	return found
}

// parseSize is the number of a text, if it is from 1 to 2^32 - 1; else 0.
func parseSize(text string) uint32 {
	size, err := strconv.ParseUint(strings.TrimPrefix(text, "+"), 10, 32)
	if err != nil {
		return 0
	}
	return uint32(size)
}

func isSameType(first, second string) bool {
	canonical := func(name string) string {
		name = lowerASCII(name)
		if alias, found := quantAliases[name]; found {
			return alias
		}
		return name
	}
	return canonical(first) == canonical(second)
}

// lowerASCII changes only ASCII letters to lower case: the lower case of some other letters is an ASCII letter.
func lowerASCII(name string) string {
	return strings.Map(func(letter rune) rune {
		if letter >= 'A' && letter <= 'Z' {
			return letter + 'a' - 'A'
		}
		return letter
	}, name)
}

// inferQuantization infers how a tensor is quantised. Scales of one byte tell a type with block scales; otherwise
// the shapes decide. They give one group size for 4 bits and half of it for 8 bits; a declared size leaves only
// that one.
func inferQuantization(weight, scale *Weight, hasBias bool, model Quantization) Quantization {
	if !hasBias && isByteScale(scale.Dtype) {
		return inferBlockScales(weight, scale)
	}
	sizeFor := func(width uint64) uint32 {
		size := groupSize(weight, scale, width)
		if declared := weight.declared.GroupSize; declared != 0 && declared != size {
			return 0
		}
		return size
	}
	four, eight := sizeFor(4), sizeFor(8)
	hintSays8Bits := strings.Contains(model.Type, "8")
	var width uint64
	switch {
	case model.bits() > 0 && model.GroupSize > 0 && sizeFor(model.bits()) == model.GroupSize:
		width = model.bits()
	case four == 32:
		width = 4
	case eight == 64, eight > 0 && (four == 0 || hintSays8Bits):
		width = 8
	case four > 0:
		width = 4
	default:
		return Quantization{}
	}
	switch {
	case width == 8:
		return Quantization{"int8", eight}
	case four == 16 && !hasBias:
		return Quantization{"nvfp4", four}
	}
	return Quantization{"int4", four}
}

func isByteScale(dtype string) bool { return dtype == "U8" || dtype == "F8_E8M0" || dtype == "F8_E4M3" }

func inferBlockScales(weight, scale *Weight) Quantization {
	four, eight := groupSize(weight, scale, 4), groupSize(weight, scale, 8)
	switch {
	case !isByteScale(scale.Dtype):
	case four == 16 && scale.Dtype != "F8_E8M0":
		return Quantization{"nvfp4", 16}
	case four == 32 && scale.Dtype != "F8_E4M3":
		return Quantization{"mxfp4", 32}
	case eight == 32 && scale.Dtype != "F8_E4M3":
		return Quantization{"mxfp8", 32}
	}
	return Quantization{}
}

// groupSize is how many elements of a width share a scale, computed from the shapes; 0 for a size that no model uses.
func groupSize(weight, scale *Weight, width uint64) uint32 {
	columns, groups := lastLength(weight), lastLength(scale)
	own := dtypeBits[weight.Dtype]
	isFloat := strings.HasPrefix(weight.Dtype, "F") || weight.Dtype == "BF16"
	if columns == 0 || groups == 0 || !packedTypes[weight.Dtype] && (!isFloat || own != width) {
		return 0
	}
	high, elements := bits.Mul64(columns, own/width)
	if high > 0 || elements%groups != 0 {
		return 0
	}
	switch size := elements / groups; size {
	case 16, 32, 64, 128:
		return uint32(size)
	}
	return 0
}

func lastLength(weight *Weight) uint64 {
	if len(weight.Shape) == 0 {
		return 0
	}
	return weight.Shape[len(weight.Shape)-1]
}
