package blobd

import (
	"strconv"
	"strings"
)

// GroupLayers groups tensors by the layer of the model to which they belong: the result has them by the name of the
// layer, such as blk.0, and by their name in it, such as attn_q.weight. See SplitName.
func GroupLayers(tensors []Tensor) map[string]map[string]Tensor {
	layers := map[string]map[string]Tensor{}
	for _, tensor := range tensors {
		layer, name := SplitName(tensor.Name)
		if layers[layer] == nil {
			layers[layer] = map[string]Tensor{}
		}
		layers[layer][name] = tensor
	}
	return layers
}

// SplitName splits a tensor's name into the name of its layer and its name in the layer: blk.0 and attn_q.weight,
// token_embd and weight.
//
// The name is split at its dots. If one of the parts is blk or mm and at least two follow, the layer's name ends with
// the part after it. Otherwise it is the first part. The rule is Ollama's.
func SplitName(name string) (layer, rest string) {
	parts := strings.Split(name, ".")
	for place, part := range parts {
		if part != "blk" && part != "mm" {
			continue
		}
		if place+2 < len(parts) {
			return strings.Join(parts[:place+2], "."), strings.Join(parts[place+2:], ".")
		}
		break
	}
	return parts[0], strings.Join(parts[1:], ".")
}

// BlockNumber is the number of the block to which a tensor belongs: 31 of blk.31.attn_q.weight. The result is false
// for a tensor outside the blocks, and for the blocks of a vision tower.
func BlockNumber(name string) (uint64, bool) {
	rest, isBlock := strings.CutPrefix(name, "blk.")
	digits, _, isSplit := strings.Cut(rest, ".")
	number, err := strconv.ParseUint(digits, 10, 64)
	return number, isBlock && isSplit && err == nil
}
