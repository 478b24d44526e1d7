package blobd

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/bits"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The limits of a safetensors header, which are those of the daemon.
const (
	maxSafetensorsHeader  = 100_000_000
	maxSafetensorsTensors = 131_072
	maxTotalDimensions    = 8 * maxSafetensorsTensors
	maxMetadata           = 65_536
	maxTextBytes          = 16 << 20
	maxNameBytes          = 64 << 10
	maxPrintableNameBytes = 1024
	metadataKey           = "__metadata__"
	lengthBytes           = 8
)

// maxUnknownDepth is how many levels of arrays and objects the value of an unknown field may have. The library's JSON
// parser allows 127 levels in all, and the header and the tensor around the field take two of them.
const maxUnknownDepth = 125

// dtypeBits has the bits of an element, by the name of its type.
var dtypeBits = map[string]uint64{
	"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
	"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
	"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}

// safetensorsHeader is a checked header: a tensor's size is its shape times its type, and the tensors cover the data
// without gap or overlap. Accepted is what version 0.8 of the safetensors library accepts: of a name that comes twice
// the last entry counts, and unknown fields of a tensor are ignored.
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
	// begin and end are offsets in the data, as in the header.
	begin, end uint64
	// offset is the offset in the file.
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
type headerReader struct {
	*json.Decoder
	// dimensions and textBytes count those of all tensors and of the metadata.
	dimensions, textBytes int
}

func readHeader(text []byte, start uint64) (*safetensorsHeader, error) {
	// The decoder replaces what is not Unicode.
	if !utf8.Valid(text) || hasHalfPair(text) || !json.Valid(text) {
		return nil, invalidHeader("wrong header: not JSON in UTF-8")
	}
	r := headerReader{Decoder: json.NewDecoder(bytes.NewReader(text))}
	r.UseNumber()
	header := &safetensorsHeader{metadata: map[string]string{}}
	entries, last, hasMetadata := 0, map[string]int{}, false
	err := r.object("header", func(name string) error {
		if name == metadataKey {
			if hasMetadata {
				return invalidHeader("wrong header: %q comes twice", name)
			}
			hasMetadata = true
			return r.metadata(header.metadata)
		}
		if entries++; entries > maxSafetensorsTensors {
			return invalidHeader("header too long: more than %d tensors", maxSafetensorsTensors)
		}
		tensor, err := r.tensor(name)
		if place, replaces := last[name]; replaces {
			header.tensors[place] = tensor
		} else {
			last[name] = len(header.tensors)
			header.tensors = append(header.tensors, tensor)
		}
		return err
	})
	// Only the last entry of a name is placed.
	for place := 0; err == nil && place < len(header.tensors); place++ {
		err = header.tensors[place].place(start)
	}
	return header, err
}

// object reads an object; value reads the value of each of its keys.
func (r *headerReader) object(what string, value func(key string) error) error {
	if err := r.delimiter(what, '{'); err != nil {
		return err
	}
	return r.members(what, value)
}

// members reads what follows the start of an object.
func (r *headerReader) members(what string, value func(key string) error) error {
	for r.More() {
		// A key is always a string.
		key, err := r.text(what)
		if err == nil {
			err = value(key)
		}
		if err != nil {
			return err
		}
	}
	return r.delimiter(what, '}')
}

// metadata reads an object of texts, or null.
func (r *headerReader) metadata(into map[string]string) error {
	first, err := r.Token()
	if err == nil && first == nil {
		return nil
	}
	if first != json.Delim('{') {
		return wrongToken("metadata", "an object of texts", err)
	}
	entries := 0
	return r.members("metadata", func(key string) error {
		if entries++; entries > maxMetadata {
			return invalidHeader("header too long: more than %d entries of metadata", maxMetadata)
		}
		text, err := r.text("metadata")
		into[key] = text
		if err == nil {
			err = r.count(len(key) + len(text))
		}
		return err
	})
}

// tensor reads an entry; the library also reads the three values without their names.
func (r *headerReader) tensor(name string) (tensor fileTensor, err error) {
	tensor.name = name
	if len(name) > maxNameBytes {
		return tensor, invalidHeader("tensor name of %d bytes: too long: expected at most %d", len(name), maxNameBytes)
	}
	if err = r.count(len(name)); err != nil {
		return tensor, err
	}
	first, err := r.Token()
	switch first {
	case json.Delim('{'):
		err = r.fields(&tensor)
	case json.Delim('['):
		for _, field := range tensorFields {
			if err == nil {
				err = r.field(&tensor, field)
			}
		}
		if err == nil {
			err = r.delimiter(name, ']')
		}
	default:
		err = wrongToken(name, "an object of dtype, shape and data_offsets", err)
	}
	return tensor, err
}

var tensorFields = [...]string{"dtype", "shape", "data_offsets"}

func (r *headerReader) fields(tensor *fileTensor) error {
	seen := map[string]bool{}
	err := r.members(tensor.name, func(key string) error {
		if !slices.Contains(tensorFields[:], key) {
			return r.skip(tensor.name)
		}
		if seen[key] {
			return invalidHeader("wrong header: tensor %.64q: %q comes twice", tensor.name, key)
		}
		seen[key] = true
		return r.field(tensor, key)
	})
	if err == nil && len(seen) != len(tensorFields) {
		err = invalidHeader("wrong header: tensor %.64q: expected dtype, shape and data_offsets", tensor.name)
	}
	return err
}

func (r *headerReader) field(tensor *fileTensor, key string) (err error) {
	switch key {
	case "dtype":
		tensor.dtype, err = r.dtype(tensor.name)
		if _, known := dtypeBits[tensor.dtype]; err == nil && !known {
			err = invalidHeader("tensor %.64q: unknown element type %.16q", tensor.name, tensor.dtype)
		}
	case "shape":
		tensor.shape, err = r.numbers(tensor.name, maxDimensions)
		if r.dimensions += len(tensor.shape); err == nil && r.dimensions > maxTotalDimensions {
			err = invalidHeader("header too long: more than %d dimensions in all tensors", maxTotalDimensions)
		}
	default:
		var offsets []uint64
		offsets, err = r.numbers(tensor.name, 2)
		if err == nil && len(offsets) != 2 {
			err = invalidHeader("wrong header: tensor %.64q: data_offsets: expected 2 numbers, found %d",
				tensor.name, len(offsets))
		}
		if err == nil {
			tensor.begin, tensor.end = offsets[0], offsets[1]
		}
	}
	return err
}

// dtype reads a type by its name; the library's derived code also reads an object, {"F32": null}.
func (r *headerReader) dtype(name string) (string, error) {
	token, err := r.Token()
	if text, ok := token.(string); ok {
		return text, nil
	}
	if token != json.Delim('{') {
		return "", wrongToken(name, "a type", err)
	}
	types := []string{}
	err = r.members(name, func(key string) error {
		types = append(types, key)
		value, err := r.Token()
		if err != nil || value != nil || len(types) > 1 {
			return wrongToken(name, "a type", err)
		}
		return nil
	})
	if err == nil && len(types) != 1 {
		err = wrongToken(name, "a type", nil)
	}
	if err != nil {
		return "", err
	}
	return types[0], nil
}

// skip reads the value of an unknown field, and refuses what the library refuses: it parses such a value first.
func (r *headerReader) skip(name string) error {
	for depth := 0; ; {
		token, err := r.Token()
		if err != nil {
			return wrongToken(name, "a value", err)
		}
		switch token := token.(type) {
		case json.Delim:
			if token == '[' || token == '{' {
				depth++
			} else {
				depth--
			}
		case json.Number:
			if _, err := token.Float64(); err != nil {
				return invalidHeader("wrong header: tensor %.64q: number out of range: %.24q", name, string(token))
			}
		}
		if depth > maxUnknownDepth {
			return invalidHeader("wrong header: tensor %.64q: lists or objects in more than %d others",
				name, maxUnknownDepth)
		}
		if depth == 0 {
			return nil
		}
	}
}

// count adds the bytes of a name or of metadata.
func (r *headerReader) count(bytes int) error {
	if r.textBytes += bytes; r.textBytes > maxTextBytes {
		return invalidHeader("header too long: more than %d bytes of names and metadata", maxTextBytes)
	}
	return nil
}

// place checks the tensor and sets its offset in the file.
func (t *fileTensor) place(start uint64) error {
	size, ok := sizeBytes(dtypeBits[t.dtype], t.shape)
	if !ok {
		return invalidHeader("tensor %.64q: shape %.64s of %s takes no whole number of bytes below 2^64",
			t.name, fmt.Sprint(t.shape), t.dtype)
	}
	_, carry := bits.Add64(start, t.end, 0)
	if t.end < t.begin || t.end-t.begin != size || carry != 0 {
		return invalidHeader("tensor %.64q: wrong size: expected %d bytes by its shape, found %d to %d",
			t.name, size, t.begin, t.end)
	}
	t.offset, t.size = start+t.begin, size
	return nil
}

func (r *headerReader) text(what string) (string, error) {
	token, err := r.Token()
	if text, ok := token.(string); ok {
		return text, nil
	}
	return "", wrongToken(what, "a text", err)
}

func (r *headerReader) delimiter(what string, expected json.Delim) error {
	token, err := r.Token()
	if token == expected {
		return nil
	}
	return wrongToken(what, expected.String(), err)
}

// numbers reads a list of at most so many numbers.
func (r *headerReader) numbers(what string, most int) ([]uint64, error) {
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
		if len(numbers) == most {
			return nil, invalidHeader("wrong header: tensor %.64q: too many numbers in a list: expected at most %d", what, most)
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

// checkPrintable refuses names that are empty, long, or have control characters.
func (h *safetensorsHeader) checkPrintable() error {
	for _, tensor := range h.tensors {
		problem := ""
		switch name := tensor.name; {
		case name == "":
			problem = "is empty"
		case len(name) > maxPrintableNameBytes:
			problem = "too long"
		case strings.ContainsFunc(name, unicode.IsControl):
			problem = "has control characters"
		}
		if problem != "" {
			return invalidHeader("tensor name of %d bytes: %s", len(tensor.name), problem)
		}
	}
	return nil
}

// sizeBytes is the size of a tensor; false if it overflows or is not a whole number of bytes. As in the library, an
// overflow before a dimension of zero is one.
func sizeBytes(width uint64, shape []uint64) (uint64, bool) {
	count := uint64(1)
	for _, factor := range append(slices.Clone(shape), width) {
		high, low := bits.Mul64(count, factor)
		if count = low; high > 0 {
			return 0, false
		}
	}
	return count / 8, count%8 == 0
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
