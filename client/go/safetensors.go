package blobd

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/bits"
	"sort"
	"strconv"
	"unicode"
	"unicode/utf8"
)

// The limits of a safetensors header, which are those of the daemon.
const (
	maxSafetensorsHeader  = 100_000_000
	maxSafetensorsTensors = 131_072
	maxNameBytes          = 1024
	metadataKey           = "__metadata__"
	lengthBytes           = 8
)

// dtypeBits has the bits of an element, by the name of its type.
var dtypeBits = map[string]uint64{
	"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
	"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
	"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}

// safetensorsHeader is a checked header: a tensor's size is its shape times its type, the tensors cover the data
// without gap or overlap, and names are unique.
type safetensorsHeader struct {
	metadata map[string]string
	// tensors are in the order of their data.
	tensors []fileTensor
	byName  map[string]int
}

type fileTensor struct {
	name, dtype string
	// shape has the slowest dimension first.
	shape []uint64
	// offset is in the file.
	offset, size uint64
}

func (h *safetensorsHeader) tensor(name string) *fileTensor {
	if place, found := h.byName[name]; found {
		return &h.tensors[place]
	}
	return nil
}

// parseSafetensors reads the header of a whole file.
func parseSafetensors(file []byte) (*safetensorsHeader, error) {
	if len(file) < lengthBytes {
		return nil, invalidHeader("incomplete: expected a header of %d bytes, found %d", lengthBytes, len(file))
	}
	length := binary.LittleEndian.Uint64(file)
	if length > maxSafetensorsHeader {
		return nil, invalidHeader("header too long: expected at most %d bytes, found %d", maxSafetensorsHeader, length)
	}
	start := lengthBytes + length
	if start > uint64(len(file)) {
		return nil, invalidHeader("incomplete: expected a header of %d bytes, found %d", start, len(file))
	}
	header, err := readHeader(file[lengthBytes:start], start)
	if err != nil {
		return nil, err
	}
	// An empty tensor comes before the one at the same offset.
	sort.SliceStable(header.tensors, func(i, j int) bool {
		first, second := header.tensors[i], header.tensors[j]
		return first.offset < second.offset || first.offset == second.offset && first.size < second.size
	})
	header.byName = make(map[string]int, len(header.tensors))
	for place, tensor := range header.tensors {
		header.byName[tensor.name] = place
	}
	return header, header.checkCover(start, uint64(len(file)))
}

// checkCover checks that the tensors cover the data exactly once.
func (h *safetensorsHeader) checkCover(start, fileSize uint64) error {
	place := start
	for _, tensor := range h.tensors {
		if tensor.offset != place {
			return invalidHeader("tensor %q: wrong offset in the data: expected %d, found %d",
				tensor.name, place-start, tensor.offset-start)
		}
		place = saturatingSum(place, tensor.size)
	}
	if place != fileSize {
		return invalidHeader("the tensors end at byte %d of the file, which has %d", place, fileSize)
	}
	return nil
}

// headerReader reads a header's JSON token by token: decoding into a map would silently keep one of two values of
// a key, and other readers might keep the other.
type headerReader struct{ *json.Decoder }

func readHeader(text []byte, start uint64) (*safetensorsHeader, error) {
	// The decoder replaces what is not Unicode.
	if !utf8.Valid(text) || hasHalfPair(text) || !json.Valid(text) {
		return nil, invalidHeader("wrong header: not JSON in UTF-8")
	}
	r := headerReader{json.NewDecoder(bytes.NewReader(text))}
	r.UseNumber()
	header := &safetensorsHeader{metadata: map[string]string{}}
	err := r.object("header", func(name string) error {
		if name == metadataKey {
			return r.metadata(header.metadata)
		}
		if len(header.tensors) >= maxSafetensorsTensors {
			return invalidHeader("more than %d tensors", maxSafetensorsTensors)
		}
		tensor, err := r.tensor(name, start)
		header.tensors = append(header.tensors, tensor)
		return err
	})
	return header, err
}

// object reads an object; value reads the value of each of its keys.
func (r headerReader) object(what string, value func(key string) error) error {
	if err := r.delimiter(what, '{'); err != nil {
		return err
	}
	seen := map[string]bool{}
	for r.More() {
		// A key is always a string.
		key, err := r.text(what)
		if err == nil && seen[key] {
			err = invalidHeader("wrong header: %.64q comes twice", key)
		}
		if err == nil {
			seen[key] = true
			err = value(key)
		}
		if err != nil {
			return err
		}
	}
	return r.delimiter(what, '}')
}

func (r headerReader) metadata(into map[string]string) error {
	return r.object("metadata", func(key string) error {
		text, err := r.text("metadata")
		into[key] = text
		return err
	})
}

func (r headerReader) tensor(name string, start uint64) (tensor fileTensor, err error) {
	if err := checkName(name); err != nil {
		return tensor, err
	}
	tensor.name = name
	var offsets []uint64
	missing := 3
	err = r.object(name, func(key string) (err error) {
		missing--
		switch key {
		case "dtype":
			tensor.dtype, err = r.text(name)
		case "shape":
			tensor.shape, err = r.numbers(name)
		case "data_offsets":
			offsets, err = r.numbers(name)
		default:
			err = invalidHeader("wrong header: tensor %q: unknown field %.64q", name, key)
		}
		return err
	})
	if err == nil && (missing != 0 || len(offsets) != 2) {
		err = invalidHeader("wrong header: tensor %q: expected dtype, shape and two data_offsets", name)
	}
	if err != nil {
		return tensor, err
	}
	return tensor, tensor.place(start, offsets[0], offsets[1])
}

// place checks the tensor and sets where it is.
func (t *fileTensor) place(start, begin, end uint64) error {
	width, known := dtypeBits[t.dtype]
	if !known {
		return invalidHeader("tensor %q: unknown element type %.16q", t.name, t.dtype)
	}
	if len(t.shape) > maxDimensions {
		return invalidHeader("tensor %q: too many dimensions: expected at most %d, found %d",
			t.name, maxDimensions, len(t.shape))
	}
	size, ok := sizeBytes(width, t.shape)
	if !ok {
		return invalidHeader("tensor %q: shape %d of %s is not a whole number of bytes", t.name, t.shape, t.dtype)
	}
	_, carry := bits.Add64(start, end, 0)
	if end < begin || end-begin != size || carry != 0 {
		return invalidHeader("tensor %q: wrong size: expected %d bytes by its shape, found %d to %d",
			t.name, size, begin, end)
	}
	t.offset, t.size = start+begin, size
	return nil
}

func (r headerReader) text(what string) (string, error) {
	token, err := r.Token()
	if text, ok := token.(string); ok {
		return text, nil
	}
	return "", wrongToken(what, "a text", err)
}

func (r headerReader) delimiter(what string, expected json.Delim) error {
	token, err := r.Token()
	if token == expected {
		return nil
	}
	return wrongToken(what, expected.String(), err)
}

func (r headerReader) numbers(what string) ([]uint64, error) {
	if err := r.delimiter(what, '['); err != nil {
		return nil, err
	}
	numbers := []uint64{}
	for r.More() {
		token, err := r.Token()
		digits, ok := token.(json.Number)
		number, wrong := strconv.ParseUint(string(digits), 10, 64)
		if !ok || wrong != nil {
			return nil, wrongToken(what, "a number from 0 to 2^64 - 1", err)
		}
		numbers = append(numbers, number)
	}
	return numbers, r.delimiter(what, ']')
}

func wrongToken(what, expected string, err error) error {
	if err != nil {
		return invalidHeader("wrong header: %v", err)
	}
	return invalidHeader("wrong header: %.64q: expected %s", what, expected)
}

func checkName(name string) error {
	problem := ""
	switch {
	case name == "":
		problem = "is empty"
	case len(name) > maxNameBytes:
		problem = "too long"
	default:
		for _, letter := range name {
			if unicode.IsControl(letter) {
				problem = "has control characters"
			}
		}
	}
	if problem == "" {
		return nil
	}
	return invalidHeader("tensor name of %d bytes: %s", len(name), problem)
}

// sizeBytes is the size of a tensor; false if it overflows or is not a whole number of bytes.
func sizeBytes(width uint64, shape []uint64) (uint64, bool) {
	for _, length := range shape {
		// An intermediate product above 2^64 is then no overflow.
		if length == 0 {
			return 0, true
		}
	}
	elements := uint64(1)
	for _, length := range shape {
		high, low := bits.Mul64(elements, length)
		if elements = low; high > 0 {
			return 0, false
		}
	}
	high, low := bits.Mul64(elements, width)
	return high<<61 | low>>3, high>>3 == 0 && low%8 == 0
}

// hasHalfPair says whether JSON has an escape that is half of a surrogate pair.
func hasHalfPair(text []byte) bool {
	for place := 0; place < len(text); place++ {
		if text[place] != '\\' {
			continue
		}
		first, escaped := unitAt(text, place)
		place++
		if !escaped || first < 0xd800 || first > 0xdfff {
			continue
		}
		second, _ := unitAt(text, place+5)
		if first > 0xdbff || second < 0xdc00 || second > 0xdfff {
			return true
		}
		place += 10
	}
	return false
}

// unitAt is the UTF-16 unit of the escape \uXXXX at a place; false if there is none.
func unitAt(text []byte, place int) (uint64, bool) {
	if place+6 > len(text) || text[place] != '\\' || text[place+1] != 'u' {
		return 0, false
	}
	unit, err := strconv.ParseUint(string(text[place+2:place+6]), 16, 16)
	return unit, err == nil
}

func invalidHeader(format string, arguments ...any) error {
	return fail(ErrSafetensors, "safetensors: %s", fmt.Sprintf(format, arguments...))
}
