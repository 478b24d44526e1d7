package blobd

import (
	"encoding/binary"
	"math/bits"
)

// The types of metadata values in GGUF.
const (
	kindUint8 uint32 = iota + 1
	kindInt8
	kindUint16
	kindInt16
	kindUint32
	kindInt32
	kindFloat32
	kindBool
	kindString
	kindArray
	kindUint64
	kindInt64
	kindFloat64
)

// kindSizes has the size of each type that has a fixed one. The numbers in a file start at 0; here 0 is no type,
// so that the zero value has none.
var kindSizes = map[uint32]uint64{
	kindUint8: 1, kindInt8: 1, kindBool: 1, kindUint16: 2, kindInt16: 2, kindUint32: 4, kindInt32: 4,
	kindFloat32: 4, kindUint64: 8, kindInt64: 8, kindFloat64: 8,
}

// The limits of blobd's own headers.
const (
	maxKeys        = 131_072
	maxGgufTensors = 131_072
	maxDimensions  = 1024
)

// parseMetadata reads the keys and the tensors' shapes of a GGUF header. The values are slices of it.
func parseMetadata(header []byte) (*Metadata, error) {
	c := &cursor{data: header, order: binary.LittleEndian}
	if string(c.take(4)) != "GGUF" {
		return nil, fail(ErrGguf, "gguf: the first four bytes are not GGUF; it is no GGUF file")
	}
	// A big-endian version starts with two zero bytes.
	if len(c.data) >= 2 && c.data[0] == 0 && c.data[1] == 0 {
		c.order = binary.BigEndian
	}
	if version := c.u32(); c.err == nil && version != 2 && version != 3 {
		return nil, fail(ErrGguf, "gguf: version: expected 2 or 3, found %d; convert the file", version)
	}
	tensors, keys := c.count("tensors", maxGgufTensors), c.count("metadata keys", maxKeys)
	metadata := &Metadata{architecture: unknown, values: map[string]value{}}
	for ; keys > 0 && c.err == nil; keys-- {
		key, found := string(c.text()), c.value()
		// Of two values for one key, which no file in the store has, the first counts.
		if _, known := metadata.values[key]; !known && c.err == nil {
			metadata.keys = append(metadata.keys, key)
			metadata.values[key] = found
		}
	}
	for ; tensors > 0 && c.err == nil; tensors-- {
		metadata.parameters = saturatingSum(metadata.parameters, c.elementCount())
	}
	if c.err != nil {
		return nil, c.err
	}
	if architecture, ok := As[string](metadata, "general.architecture"); ok {
		metadata.architecture = architecture
	}
	return metadata, nil
}

// cursor reads bytes in order and never beyond their end. After an error it returns zeros.
type cursor struct {
	data  []byte
	order binary.ByteOrder
	err   error
}

func (c *cursor) take(length uint64) []byte {
	if c.err == nil && length > uint64(len(c.data)) {
		c.err = fail(ErrGguf, "gguf: the header ends in the middle; verify the model")
	}
	if c.err != nil {
		return nil
	}
	taken := c.data[:length]
	c.data = c.data[length:]
	return taken
}

func (c *cursor) u32() uint32 {
	if taken := c.take(4); taken != nil {
		return c.order.Uint32(taken)
	}
	return 0
}

func (c *cursor) u64() uint64 {
	if taken := c.take(8); taken != nil {
		return c.order.Uint64(taken)
	}
	return 0
}

func (c *cursor) count(what string, limit uint64) uint64 {
	count := c.u64()
	if c.err == nil && count > limit {
		c.err = fail(ErrGguf, "gguf: %d %s, at most %d allowed; upgrade", count, what, limit)
	}
	return count
}

func (c *cursor) text() []byte { return c.take(c.u64()) }

func (c *cursor) kind() uint32 {
	number := c.u32()
	if c.err == nil && number >= kindFloat64 {
		c.err = fail(ErrGguf, "gguf: a value of type %d is none of the known; upgrade", number)
	}
	return number + 1
}

func (c *cursor) value() value {
	found := value{kind: c.kind(), count: 1, order: c.order}
	count := uint64(1)
	if found.kind == kindArray {
		found.isList, found.kind, count = true, c.kind(), c.u64()
		if c.err == nil && found.kind == kindArray {
			c.err = fail(ErrGguf, "gguf: an array of arrays; engines read none")
		}
	}
	start := c.data
	if found.kind == kindString {
		for left := count; left > 0 && c.err == nil; left-- {
			c.text()
		}
	} else {
		high, length := bits.Mul64(count, kindSizes[found.kind])
		if high > 0 {
			length = 1<<64 - 1
		}
		c.take(length)
	}
	if c.err == nil {
		// Every element takes a byte at least, so the number fits.
		found.count, found.data = int(count), start[:len(start)-len(c.data)]
	}
	return found
}

// elementCount reads a tensor's entry.
func (c *cursor) elementCount() uint64 {
	c.text()
	rank := c.u32()
	if c.err == nil && rank > maxDimensions {
		c.err = fail(ErrGguf, "gguf: a tensor has %d dimensions, at most %d allowed; upgrade", rank, maxDimensions)
	}
	elements := uint64(1)
	for ; rank > 0 && c.err == nil; rank-- {
		high, low := bits.Mul64(elements, c.u64())
		if elements = low; high > 0 {
			elements = 1<<64 - 1
		}
	}
	c.take(4 + 8) // Type and offset.
	return elements
}

func saturatingSum(first, second uint64) uint64 {
	sum, carry := bits.Add64(first, second, 0)
	if carry > 0 {
		return 1<<64 - 1
	}
	return sum
}
