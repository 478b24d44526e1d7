package blobd

import (
	"encoding/binary"
	"math"
	"unicode/utf8"
)

// Metadata is the metadata in a GGUF header, by key and type.
//
// Most keys of a model start with its architecture: llama.block_count. All methods take them without
// it. A value of another type than the requested one, even of another integer width, counts as missing.
// The rules are those of Ollama and of blobd's Rust client.
type Metadata struct {
	architecture string
	parameters   uint64
	keys         []string
	values       map[string]value
}

// Range is the smallest and the largest number of a value.
type Range struct {
	Min, Max uint32
}

// MetadataType is a type of metadata values. Each is that of exactly one type in GGUF.
type MetadataType interface {
	uint8 | int8 | uint16 | int16 | uint32 | int32 | uint64 | int64 | float32 | float64 | bool | string |
		[]uint8 | []int8 | []uint16 | []int16 | []uint32 | []int32 | []uint64 | []int64 | []float32 | []float64 |
		[]bool | []string
}

// Metadata returns the metadata in the header of the model's first split GGUF file; of a sharded model, that
// is the shard with the metadata of all. It stays valid when the model is closed.
func (m *Model) Metadata() (*Metadata, error) {
	header, err := m.Header()
	if err != nil {
		return nil, err
	}
	// A copy, which outlives Unmap.
	return parseMetadata(append([]byte(nil), header...))
}

// As returns the value of a key, without the architecture, if it has exactly this type:
//
//	frequency, found := blobd.As[float32](metadata, "rope.freq_base")
//
// A string that is not UTF-8 counts as missing, and is left out of a list.
func As[T MetadataType](m *Metadata, key string) (T, bool) {
	found, ok := m.values[m.FullKey(key)].decode().(T)
	switch text := any(found).(type) {
	case string:
		ok = ok && utf8.ValidString(text)
	case []string:
		valid := []string{}
		for _, element := range text {
			if utf8.ValidString(element) {
				valid = append(valid, element)
			}
		}
		found = any(valid).(T)
	}
	if !ok {
		var none T
		return none, false
	}
	return found, true
}

// FullKey is the key as the file has it: keys that start with general. or tokenizer. are unchanged, all
// others get the architecture in front.
func (m *Metadata) FullKey(key string) string {
	for _, start := range []string{"general.", "tokenizer."} {
		if len(key) >= len(start) && key[:len(start)] == start {
			return key
		}
	}
	return m.architecture + "." + key
}

// Keys are all keys, as the file has them and in its order. They must not be changed.
func (m *Metadata) Keys() []string { return m.keys }

// Value is the value of a key as the file has it (FullKey), of one of the types of MetadataType. Strings are
// the file's bytes, which need not be UTF-8.
func (m *Metadata) Value(fullKey string) (any, bool) {
	found, ok := m.values[fullKey]
	return found.decode(), ok
}

// Range is the minimum and maximum of a uint32, or of a list of uint32 or int32, as many keys are a number or
// one number per block. An empty list counts as missing. The numbers of a list of int32 are ordered as signed
// numbers; a negative one is then read as unsigned.
func (m *Metadata) Range(key string) (Range, bool) {
	if number, ok := As[uint32](m, key); ok {
		return Range{number, number}, true
	}
	if numbers, ok := As[[]uint32](m, key); ok {
		least, most, ok := leastAndMost(numbers)
		return Range{least, most}, ok
	}
	numbers, _ := As[[]int32](m, key)
	least, most, ok := leastAndMost(numbers)
	return Range{uint32(least), uint32(most)}, ok
}

// Architecture is the model's architecture, such as llama; unknown if the header has none.
func (m *Metadata) Architecture() string { return m.architecture }

// Kind is what the file is, such as model or adapter: general.type, else unknown.
func (m *Metadata) Kind() string {
	if kind, ok := As[string](m, "general.type"); ok {
		return kind
	}
	return unknown
}

// ParameterCount is the number of elements of all tensors in the header, whatever general.parameter_count says.
func (m *Metadata) ParameterCount() uint64 { return m.parameters }

// FileType is llama.cpp's number of the file type; 0 if unknown, as in Ollama.
func (m *Metadata) FileType() uint32 { return m.number("general.file_type") }

// BlockCount is the number of blocks; 0 if missing.
func (m *Metadata) BlockCount() uint32 { return m.number("block_count") }

// ContextLength is the longest context for which the model was trained, in tokens; 0 if missing.
func (m *Metadata) ContextLength() uint32 { return m.number("context_length") }

// EmbeddingLength is the length of an embedding; 0 if missing.
func (m *Metadata) EmbeddingLength() uint32 { return m.number("embedding_length") }

// HeadCount is the fewest and the most attention heads of a block; 1 if missing.
func (m *Metadata) HeadCount() Range { return m.heads("attention.head_count") }

// HeadCountKV is the fewest and the most key and value heads of a block; 1 if missing.
func (m *Metadata) HeadCountKV() Range { return m.heads("attention.head_count_kv") }

// HeadSizeMax is the largest size of a head in elements: the embedding length divided by the fewest heads; 0 if there
// are none.
func (m *Metadata) HeadSizeMax() uint32 {
	if heads := m.HeadCount().Min; heads > 0 {
		return m.EmbeddingLength() / heads
	}
	return 0
}

// HeadSizeK is the size of a key head in elements: attention.key_length, else HeadSizeMax.
func (m *Metadata) HeadSizeK() uint32 { return m.headSize("attention.key_length") }

// HeadSizeV is the size of a value head in elements: attention.value_length, else HeadSizeMax.
func (m *Metadata) HeadSizeV() uint32 { return m.headSize("attention.value_length") }

// ChatTemplate is the template of a chat, in Jinja.
func (m *Metadata) ChatTemplate() (string, bool) { return As[string](m, "tokenizer.chat_template") }

func (m *Metadata) number(key string) uint32 {
	number, _ := As[uint32](m, key)
	return number
}

func (m *Metadata) headSize(key string) uint32 {
	if size, ok := As[uint32](m, key); ok {
		return size
	}
	return m.HeadSizeMax()
}

func (m *Metadata) heads(key string) Range {
	if heads, ok := m.Range(key); ok {
		return heads
	}
	return Range{1, 1}
}

func leastAndMost[T uint32 | int32](numbers []T) (least, most T, ok bool) {
	for place, number := range numbers {
		if place == 0 || number < least {
			least = number
		}
		if place == 0 || number > most {
			most = number
		}
	}
	return least, most, len(numbers) > 0
}

// unknown is the name of an architecture that the header does not have.
const unknown = "unknown"

// value is a value as it is in the header.
type value struct {
	kind uint32
	// count is the number of elements of a list, and 1 otherwise.
	count  int
	isList bool
	// data has exactly the elements.
	data  []byte
	order binary.ByteOrder
}

// decode returns the value in a type of MetadataType; nil if there is none.
func (v value) decode() any {
	switch v.kind {
	case kindUint8:
		return elements(v, 1, func(b []byte) uint8 { return b[0] })
	case kindInt8:
		return elements(v, 1, func(b []byte) int8 { return int8(b[0]) })
	case kindUint16:
		return elements(v, 2, v.order.Uint16)
	case kindInt16:
		return elements(v, 2, func(b []byte) int16 { return int16(v.order.Uint16(b)) })
	case kindUint32:
		return elements(v, 4, v.order.Uint32)
	case kindInt32:
		return elements(v, 4, func(b []byte) int32 { return int32(v.order.Uint32(b)) })
	case kindFloat32:
		return elements(v, 4, func(b []byte) float32 { return math.Float32frombits(v.order.Uint32(b)) })
	case kindBool:
		return elements(v, 1, func(b []byte) bool { return b[0] != 0 })
	case kindString:
		return v.texts()
	case kindUint64:
		return elements(v, 8, v.order.Uint64)
	case kindInt64:
		return elements(v, 8, func(b []byte) int64 { return int64(v.order.Uint64(b)) })
	case kindFloat64:
		return elements(v, 8, func(b []byte) float64 { return math.Float64frombits(v.order.Uint64(b)) })
	}
	return nil
}

func elements[T any](v value, size int, read func([]byte) T) any {
	if !v.isList {
		return read(v.data)
	}
	list := make([]T, v.count)
	for place := range list {
		list[place] = read(v.data[place*size:])
	}
	return list
}

func (v value) texts() any {
	list, rest := make([]string, v.count), v.data
	for place := range list {
		end := 8 + v.order.Uint64(rest)
		list[place], rest = string(rest[8:end]), rest[end:]
	}
	if !v.isList {
		return list[0]
	}
	return list
}
