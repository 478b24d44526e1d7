"""The part of the GGUF format that is needed to find metadata, and to change the tensor offsets in a header.

A header is a count of tensors and of metadata, the metadata, and the tensors' names, shapes, types
and offsets. Metadata stays unchanged, byte for byte, except `general.alignment`. The parser reads
through a bounded cursor, without recursion, and allocates only for bytes that exist.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Iterator, List, Literal, Optional, Sequence, Tuple

from .errors import GgufError

MAX_HEADER_BYTES = 33 << 20
"""The longest header that is read: blobd's limit plus padding."""
MAX_TENSORS = 131_072
"""The most tensors that are read; blobd stores no more."""
MAX_KEYS = 131_072
"""The most metadata keys that are read; blobd stores no more."""
MAX_DIMENSIONS = 1024
"""The most dimensions of a tensor that are read; blobd stores no more."""
DEFAULT_ALIGNMENT = 32
"""The alignment of tensors if the metadata does not give one."""

_ALIGNMENT_KEY = b"general.alignment"
_UINT32 = 4
_STRING = 8
_ARRAY = 9
# The size of a value, for each type that has a fixed size.
_FIXED_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file declares it."""

    name: bytes
    """Its name."""
    shape: Tuple[int, ...]
    """Its dimensions, the fastest first."""
    type_id: int
    """The number of its ggml type."""
    offset: int
    """Its start, relative to the start of the data section."""

    @property
    def element_count(self) -> int:
        """The product of its dimensions; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A header: the bytes of the metadata, and the tensors."""

    version: int
    """The version of the format, 2 or 3; this module treats both alike."""
    order: str
    """The byte order of its numbers, `<` or `>`."""
    key_count: int
    """The number of metadata keys."""
    metadata: bytes
    """All metadata, as it is in the file."""
    alignment_place: Optional[int]
    """The offset of the value of `general.alignment` in `metadata`, if it is present."""
    alignment: int
    """The alignment of the tensors."""
    tensors: Tuple[TensorInfo, ...]
    """The tensors, in the order of the file's table."""
    length: int
    """The length of the header without its padding."""

    def rewritten(self, alignment: int, offsets: Sequence[int]) -> bytes:
        """The header of a file with the same content, but this alignment and these tensor offsets,
        including the padding up to its data section."""
        key_count, metadata = self.key_count, bytearray(self.metadata)
        value = struct.pack(self.order + "I", alignment)
        if self.alignment_place is None:
            key_count += 1
            metadata += struct.pack(self.order + "Q", len(_ALIGNMENT_KEY)) + _ALIGNMENT_KEY
            metadata += struct.pack(self.order + "I", _UINT32) + value
        else:
            metadata[self.alignment_place : self.alignment_place + len(value)] = value
        parts = [
            b"GGUF",
            struct.pack(self.order + "IQQ", self.version, len(self.tensors), key_count),
            bytes(metadata),
        ]
        for tensor, offset in zip(self.tensors, offsets):
            rank = len(tensor.shape)
            parts.append(struct.pack(self.order + "Q", len(tensor.name)) + tensor.name)
            numbers = (rank, *tensor.shape, tensor.type_id, offset)
            parts.append(struct.pack(f"{self.order}I{rank}QIQ", *numbers))
        header = b"".join(parts)
        return header + bytes(-len(header) % alignment)


def parse(data: memoryview) -> Header:
    """Reads the header at the start of `data`; what follows it is ignored.

    Raises `GgufError` if the bytes are not a GGUF header or end inside it.
    """
    # A copy: slicing `bytes` is several times faster, and this is only metadata.
    cursor = _Cursor(bytes(data[:MAX_HEADER_BYTES]))
    if cursor.take(4) != b"GGUF":
        raise GgufError("gguf: the first four bytes are not GGUF; it is no GGUF file")
    cursor.choose_order()
    version = cursor.u32()
    if version not in (2, 3):
        raise GgufError(f"gguf: version: expected 2 or 3, found {version}; convert the file")
    tensor_count = cursor.count("tensors", MAX_TENSORS)
    key_count = cursor.count("metadata keys", MAX_KEYS)
    start = cursor.place
    alignment_place = None
    for _ in range(key_count):
        alignment_place = _skip_key(cursor) or alignment_place
    end = cursor.place
    tensors: List[TensorInfo] = [_read_tensor(cursor) for _ in range(tensor_count)]
    return Header(
        version=version,
        order=cursor.order,
        key_count=key_count,
        metadata=cursor.between(start, end),
        alignment_place=None if alignment_place is None else alignment_place - start,
        alignment=DEFAULT_ALIGNMENT if alignment_place is None else cursor.u32_at(alignment_place),
        tensors=tuple(tensors),
        length=cursor.place,
    )


def read_values(header: Header) -> Iterator[Tuple[bytes, int, int]]:
    """Each key of a header, with the number of its value's type and the value's offset in the metadata."""
    cursor = _Cursor(header.metadata, header.order)
    for _ in range(header.key_count):
        key, kind = cursor.string(), cursor.u32()
        yield key, kind, cursor.place
        _skip_value(kind, cursor)


def _skip_key(cursor: _Cursor) -> Optional[int]:
    """Skips a key and its value; returns the value's offset if the key is the alignment's."""
    key, kind = cursor.string(), cursor.u32()
    place = cursor.place
    _skip_value(kind, cursor)
    if key != _ALIGNMENT_KEY:
        return None
    if kind != _UINT32:
        raise GgufError(f"gguf: general.alignment at byte {place} is no uint32; the file is damaged")
    return place


def _skip_value(kind: int, cursor: _Cursor) -> None:
    if kind == _STRING:
        cursor.string()
    elif kind == _ARRAY:
        _skip_array(cursor)
    else:
        cursor.skip(_fixed_size(kind, cursor))


def _skip_array(cursor: _Cursor) -> None:
    kind, count = cursor.u32(), cursor.u64()
    if kind == _STRING:
        cursor.skip_strings(count)
    else:
        # Arrays of arrays have no size here: blobd stores no such file, and engines read none.
        cursor.skip(count * _fixed_size(kind, cursor))


def _fixed_size(kind: int, cursor: _Cursor) -> int:
    size = _FIXED_SIZES.get(kind)
    if size is None:
        raise GgufError(f"gguf: a value of type {kind} before byte {cursor.place} is none of the known; upgrade")
    return size


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name, rank = cursor.string(), cursor.u32()
    if rank > MAX_DIMENSIONS:
        raise GgufError(f"gguf: tensor {name!r} has {rank} dimensions, at most {MAX_DIMENSIONS} allowed; upgrade")
    shape = tuple(cursor.u64() for _ in range(rank))
    return TensorInfo(name, shape, cursor.u32(), cursor.u64())


class _Cursor:
    """Reads bytes in order and never beyond their end."""

    def __init__(self, data: bytes, order: str = "<") -> None:
        self._data = data
        self.place = 0
        self.order = order

    def choose_order(self) -> None:
        """Detects the byte order from the version that comes next, which is a small number."""
        if self._data[self.place : self.place + 2] == b"\0\0":
            self.order = ">"

    def take(self, length: int) -> bytes:
        start = self.place
        self.skip(length)
        return self._data[start : self.place]

    def skip(self, length: int) -> None:
        if length > len(self._data) - self.place:
            raise GgufError(f"gguf: the header ends at byte {len(self._data)} in the middle; verify the model")
        self.place += length

    def u32(self) -> int:
        return int.from_bytes(self.take(4), self._name())

    def u64(self) -> int:
        return int.from_bytes(self.take(8), self._name())

    def u32_at(self, place: int) -> int:
        return int.from_bytes(self._data[place : place + 4], self._name())

    def count(self, what: str, limit: int) -> int:
        count = self.u64()
        if count > limit:
            raise GgufError(f"gguf: {count} {what}, at most {limit} allowed; upgrade")
        return count

    def string(self) -> bytes:
        return self.take(self.u64())

    def skip_strings(self, count: int) -> None:
        """Skips that many strings, with few calls: vocabularies have hundreds of thousands."""
        data, place, length = self._data, self.place, len(self._data)
        read = struct.Struct(self.order + "Q").unpack_from
        while count > 0 and place + 8 <= length:
            place += 8 + read(data, place)[0]
            count -= 1
        self.place = min(place, length)
        if count > 0 or place > length:
            self.skip(length + 1)

    def between(self, start: int, end: int) -> bytes:
        return self._data[start:end]

    def _name(self) -> Literal["little", "big"]:
        return "little" if self.order == "<" else "big"
