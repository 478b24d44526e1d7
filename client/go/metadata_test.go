package blobd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"
)

// ggufKey is a key of a generated header, with its value after the type.
type ggufKey struct {
	key  string
	kind uint32
	data []any
}

// headerOf is a header with the architecture llama, these keys, and tensors of these shapes.
func headerOf(order binary.ByteOrder, shapes [][]uint64, entries ...ggufKey) []byte {
	var file bytes.Buffer
	put := func(values ...any) {
		for _, value := range values {
			if text, ok := value.(string); ok {
				binary.Write(&file, order, uint64(len(text)))
				file.WriteString(text)
				continue
			}
			binary.Write(&file, order, value)
		}
	}
	file.WriteString("GGUF")
	put(uint32(3), uint64(len(shapes)), uint64(len(entries)+1), "general.architecture", uint32(8), "llama")
	for _, entry := range entries {
		put(entry.key, entry.kind-1)
		put(entry.data...)
	}
	for place, shape := range shapes {
		put(fmt.Sprint("tensor", place), uint32(len(shape)), shape, uint32(0), uint64(0))
	}
	return file.Bytes()
}

func metadataOf(t *testing.T, entries ...ggufKey) *Metadata {
	t.Helper()
	metadata, err := parseMetadata(headerOf(binary.LittleEndian, nil, entries...))
	if err != nil {
		t.Fatal(err)
	}
	return metadata
}

func number(key string, value uint32) ggufKey { return ggufKey{key, kindUint32, []any{value}} }

func TestKeysHaveTheArchitectureInFront(t *testing.T) {
	metadata := metadataOf(t, number("llama.block_count", 32), number("block_count", 7), number("llama.block_count", 9))
	if metadata.Architecture() != "llama" || metadata.BlockCount() != 32 {
		t.Error(metadata)
	}
	for key, full := range map[string]string{"x": "llama.x", "general.x": "general.x", "tokenizer.x": "tokenizer.x"} {
		if metadata.FullKey(key) != full {
			t.Error(metadata.FullKey(key))
		}
	}
	if value, found := metadata.Value("block_count"); !found || value != uint32(7) {
		t.Error(value, found)
	}
	if value, found := metadata.Value("none"); found || value != nil {
		t.Error(value, found)
	}
	if fmt.Sprint(metadata.Keys()) != "[general.architecture llama.block_count block_count]" {
		t.Error(metadata.Keys())
	}
}

// hasOnly checks that a value is that of one type and of no other.
func hasOnly[T MetadataType](t *testing.T, m *Metadata, key string, expected T) {
	t.Helper()
	if found, ok := As[T](m, key); !ok || !reflect.DeepEqual(found, expected) {
		t.Errorf("%s: %v, %v expected", key, found, expected)
	}
	others := 0
	for _, ok := range []bool{
		has[uint8](m, key), has[int8](m, key), has[uint16](m, key), has[int16](m, key), has[uint32](m, key),
		has[int32](m, key), has[uint64](m, key), has[int64](m, key), has[float32](m, key), has[float64](m, key),
		has[bool](m, key), has[string](m, key), has[[]uint8](m, key), has[[]uint32](m, key), has[[]bool](m, key),
		has[[]string](m, key), has[[]float32](m, key), has[[]int64](m, key),
	} {
		if ok {
			others++
		}
	}
	if others != 1 {
		t.Errorf("%s: it has %d types", key, others)
	}
}

func has[T MetadataType](m *Metadata, key string) bool {
	_, ok := As[T](m, key)
	return ok
}

func TestValueHasExactlyOneType(t *testing.T) {
	for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		list := func(key string, kind uint32, count uint64, values ...any) ggufKey {
			return ggufKey{key, kindArray, append([]any{kind - 1, count}, values...)}
		}
		metadata, err := parseMetadata(headerOf(order, nil,
			ggufKey{"llama.uint8", kindUint8, []any{uint8(255)}}, ggufKey{"llama.int8", kindInt8, []any{int8(-1)}},
			ggufKey{"llama.uint16", kindUint16, []any{uint16(65535)}}, ggufKey{"llama.int16", kindInt16, []any{int16(-2)}},
			number("llama.uint32", 1<<31), ggufKey{"llama.int32", kindInt32, []any{int32(-3)}},
			ggufKey{"llama.uint64", kindUint64, []any{uint64(1) << 63}}, ggufKey{"llama.int64", kindInt64, []any{int64(-4)}},
			ggufKey{"llama.float32", kindFloat32, []any{float32(1.5)}}, ggufKey{"llama.float64", kindFloat64, []any{0.1}},
			ggufKey{"llama.bool", kindBool, []any{uint8(237)}}, ggufKey{"llama.string", kindString, []any{"ü"}},
			list("llama.uint8s", kindUint8, 2, uint8(1), uint8(2)), list("llama.uint32s", kindUint32, 0),
			list("llama.bools", kindBool, 2, uint8(0), uint8(1)), list("llama.strings", kindString, 3, "a", "\xff", ""),
			list("llama.float32s", kindFloat32, 1, float32(-1)), list("llama.int64s", kindInt64, 1, int64(-1)),
		))
		if err != nil {
			t.Fatal(err)
		}
		hasOnly(t, metadata, "uint8", uint8(255))
		hasOnly(t, metadata, "int8", int8(-1))
		hasOnly(t, metadata, "uint16", uint16(65535))
		hasOnly(t, metadata, "int16", int16(-2))
		hasOnly(t, metadata, "uint32", uint32(1)<<31)
		hasOnly(t, metadata, "int32", int32(-3))
		hasOnly(t, metadata, "uint64", uint64(1)<<63)
		hasOnly(t, metadata, "int64", int64(-4))
		hasOnly(t, metadata, "float32", float32(1.5))
		hasOnly(t, metadata, "float64", 0.1)
		hasOnly(t, metadata, "bool", true)
		hasOnly(t, metadata, "string", "ü")
		hasOnly(t, metadata, "uint8s", []uint8{1, 2})
		hasOnly(t, metadata, "uint32s", []uint32{})
		hasOnly(t, metadata, "bools", []bool{false, true})
		hasOnly(t, metadata, "strings", []string{"a", ""})
		hasOnly(t, metadata, "float32s", []float32{-1})
		hasOnly(t, metadata, "int64s", []int64{-1})
	}
}

func TestTextThatIsNotUTF8CountsAsMissing(t *testing.T) {
	metadata := metadataOf(t, ggufKey{"llama.x", kindString, []any{"\xff"}}, ggufKey{"tokenizer.chat_template", kindString, []any{"{{ x }}"}})
	if _, ok := As[string](metadata, "x"); ok {
		t.Error("it is no text")
	}
	if value, _ := metadata.Value("llama.x"); value != "\xff" {
		t.Error(value)
	}
	if template, ok := metadata.ChatTemplate(); !ok || template != "{{ x }}" {
		t.Error(template)
	}
}

func TestMissingKeysHaveOllamasDefaults(t *testing.T) {
	metadata := metadataOf(t, ggufKey{"llama.block_count", kindUint64, []any{uint64(32)}})
	if metadata.Kind() != "unknown" || metadata.FileType() != 0 || metadata.BlockCount() != 0 ||
		metadata.ContextLength() != 0 || metadata.EmbeddingLength() != 0 || metadata.ParameterCount() != 0 ||
		metadata.HeadCount() != (Range{1, 1}) || metadata.HeadCountKV() != (Range{1, 1}) {
		t.Error(metadata)
	}
	if _, ok := metadata.ChatTemplate(); ok {
		t.Error("there is no template")
	}
}

func TestKeysAreRead(t *testing.T) {
	header := headerOf(binary.LittleEndian, [][]uint64{{8, 4}, {64}, {}},
		ggufKey{"general.type", kindString, []any{"model"}}, number("general.file_type", 15),
		ggufKey{"general.parameter_count", kindUint64, []any{uint64(7)}},
		number("llama.context_length", 8192), number("llama.embedding_length", 4096), number("llama.attention.head_count_kv", 8))
	metadata, err := parseMetadata(header)
	if err != nil {
		t.Fatal(err)
	}
	if metadata.Kind() != "model" || metadata.FileType() != 15 || metadata.ContextLength() != 8192 ||
		metadata.EmbeddingLength() != 4096 || metadata.HeadCountKV() != (Range{8, 8}) || metadata.ParameterCount() != 97 {
		t.Error(metadata)
	}
}

func TestHeadsAreANumberOrOneNumberPerBlock(t *testing.T) {
	key := "llama.attention.head_count"
	for _, test := range []struct {
		entry    ggufKey
		expected Range
	}{
		{number(key, 32), Range{32, 32}},
		{ggufKey{key, kindArray, []any{kindUint32 - 1, uint64(3), []uint32{8, 0, 16}}}, Range{0, 16}},
		{ggufKey{key, kindArray, []any{kindInt32 - 1, uint64(2), []int32{4, 2}}}, Range{2, 4}},
		// Ordered as signed numbers, read as unsigned.
		{ggufKey{key, kindArray, []any{kindInt32 - 1, uint64(2), []int32{4, -1}}}, Range{math.MaxUint32, 4}},
		{ggufKey{key, kindArray, []any{kindUint32 - 1, uint64(0)}}, Range{1, 1}},
		{ggufKey{key, kindInt32, []any{int32(32)}}, Range{1, 1}},
	} {
		if found := metadataOf(t, test.entry).HeadCount(); found != test.expected {
			t.Error(test.entry, found)
		}
	}
}

func TestElementCountsSaturate(t *testing.T) {
	shapes := [][]uint64{{math.MaxUint64, 2}, {5}}
	metadata, err := parseMetadata(headerOf(binary.LittleEndian, shapes))
	if err != nil || metadata.ParameterCount() != math.MaxUint64 {
		t.Error(metadata, err)
	}
}

func TestDamagedHeadersAreRefused(t *testing.T) {
	list := func(kind uint32, count uint64, values ...any) ggufKey {
		return ggufKey{"x", kindArray, append([]any{kind - 1, count}, values...)}
	}
	whole := headerOf(binary.LittleEndian, [][]uint64{{1, 2, 3, 4}}, number("x", 1), list(kindString, 2, "a", "b"))
	if _, err := parseMetadata(whole); err != nil {
		t.Fatal(err)
	}
	video := headerOf(binary.LittleEndian, [][]uint64{{2, 2, 1, 16, 5120}})
	if metadata, err := parseMetadata(video); err != nil || metadata.ParameterCount() != 2*2*16*5120 {
		t.Fatal(metadata, err)
	}
	headers := [][]byte{
		headerOf(binary.LittleEndian, [][]uint64{make([]uint64, maxDimensions+1)}),
		headerOf(binary.LittleEndian, nil, ggufKey{"x", kindFloat64 + 1, []any{uint8(0)}}),
		headerOf(binary.LittleEndian, nil, list(kindArray, 0)),
		headerOf(binary.LittleEndian, nil, list(kindFloat64+1, 1, uint8(0))),
		headerOf(binary.LittleEndian, nil, list(kindUint64, 1<<62)),
		headerOf(binary.LittleEndian, nil, list(kindUint8, math.MaxUint64)),
		headerOf(binary.LittleEndian, nil, list(kindString, math.MaxUint64)),
		append([]byte("FUGG"), whole[4:]...),
		append(append([]byte("GGUF"), 9, 0, 0, 0), whole[8:]...),
		append(append([]byte{}, whole[:8]...), bytes.Repeat([]byte{255}, 16)...),
	}
	for length := range whole {
		headers = append(headers, whole[:length])
	}
	for place, header := range headers {
		if _, err := parseMetadata(header); !errors.Is(err, ErrGguf) || CodeOf(err) != CodeInvalidInput {
			t.Error(place, err)
		}
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add(headerOf(binary.BigEndian, [][]uint64{{1}}, number("x", 1)))
	f.Fuzz(func(t *testing.T, header []byte) {
		metadata, err := parseMetadata(header)
		if err != nil {
			return
		}
		for _, key := range metadata.Keys() {
			if value, found := metadata.Value(key); !found || value == nil {
				t.Error(key)
			}
		}
		metadata.HeadCount()
	})
}

func TestHeadSizesAreTheKeysOrFollowFromTheHeads(t *testing.T) {
	embedding := number("llama.embedding_length", 4096)
	heads := ggufKey{"llama.attention.head_count", kindArray, []any{kindUint32 - 1, uint64(2), uint32(32), uint32(16)}}
	for _, test := range []struct {
		entries  []ggufKey
		expected [3]uint32
	}{
		{[]ggufKey{embedding, heads, number("llama.attention.key_length", 192)}, [3]uint32{256, 192, 256}},
		// A value of another type counts as missing.
		{[]ggufKey{embedding, {"llama.attention.value_length", kindUint64, []any{uint64(64)}}}, [3]uint32{4096, 4096, 4096}},
		{[]ggufKey{embedding, number("llama.attention.head_count", 0)}, [3]uint32{}},
	} {
		m := metadataOf(t, test.entries...)
		if found := [3]uint32{m.HeadSizeMax(), m.HeadSizeK(), m.HeadSizeV()}; found != test.expected {
			t.Error(found, "expected", test.expected)
		}
	}
}
