"""The header of a safetensors file, checked.

Accepted is what version 0.8 of the `safetensors` library accepts, and it means the same tensors: of a name that comes
twice the last entry counts, and unknown fields of a tensor are ignored. In a `Header`, a tensor's size is its shape
times its type, and the tensors cover the data without gap or overlap. The limits of what a header may cost are those of
the daemon.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, cast

from .errors import SafetensorsError

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is read: the limit of the `safetensors` library."""
MAX_TENSORS = 131_072
"""The most tensors of a file."""
MAX_DIMENSIONS = 1024
"""The most dimensions of a tensor."""
MAX_TOTAL_DIMENSIONS = 8 * MAX_TENSORS
"""The most dimensions of all tensors together."""
MAX_METADATA = 65_536
"""The most entries of the metadata."""
MAX_TEXT_BYTES = 16 << 20
"""The most bytes of all names and of the metadata."""
MAX_NAME_BYTES = 64 << 10
"""The longest name of a tensor, in bytes."""
MAX_PRINTABLE_NAME_BYTES = 1024
"""The longest name that `Header.check_printable` accepts."""

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""The bits of an element, by the name of its type."""

_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_LENGTH_BYTES = 8
_MAX_U64 = (1 << 64) - 1
# How many levels of arrays and objects the value of an unknown field may have. The library's JSON parser allows 127 in
# all, and the header and the tensor around the field take two of them.
_MAX_UNKNOWN_DEPTH = 125


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file."""

    name: str
    """Its key in the header: any text, never a path."""
    dtype: str
    """The name of its element type, such as `BF16`."""
    shape: Tuple[int, ...]
    """Its dimensions, the slowest first; a scalar has none."""
    offset: int
    """Its offset in the file."""
    size: int
    """Its size in bytes."""


class Header:
    """A checked header."""

    def __init__(self, metadata: Optional[Dict[str, str]], tensors: List[FileTensor], data_offset: int) -> None:
        self.has_metadata = metadata is not None
        """Whether there is an object of metadata, which may be empty."""
        self.metadata = metadata or {}
        """The metadata."""
        self.tensors = tuple(tensors)
        """The tensors, in the order of their data."""
        self.data_offset = data_offset
        """Where the data starts in the file."""
        self._by_name = {tensor.name: tensor for tensor in tensors}

    def tensor(self, name: str) -> Optional[FileTensor]:
        """The tensor with this name."""
        return self._by_name.get(name)

    def check_printable(self) -> None:
        """Raises `SafetensorsError` if the name of a tensor is empty, long, or has control characters."""
        for tensor in self.tensors:
            length, problem = len(tensor.name.encode()), None
            if length == 0:
                problem = "is empty"
            elif length > MAX_PRINTABLE_NAME_BYTES:
                problem = "too long"
            elif any(letter < " " or "\x7f" <= letter < "\xa0" for letter in tensor.name):
                problem = "has control characters"
            if problem:
                raise SafetensorsError(f"tensor name of {length} bytes: {problem}")


def parse(data: memoryview, file_size: Optional[int] = None) -> Header:
    """Reads the header of a file. `data` is the whole file; with `file_size`, its start.

    Raises `SafetensorsError` if it is not a valid one.
    """
    if len(data) < _LENGTH_BYTES:
        raise SafetensorsError(f"incomplete: expected a header of {_LENGTH_BYTES} bytes, found {len(data)}")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise SafetensorsError(f"header too long: expected at most {MAX_HEADER_BYTES} bytes, found {length}")
    start = _LENGTH_BYTES + length
    if start > len(data):
        raise SafetensorsError(f"incomplete: expected a header of {start} bytes, found {len(data)}")
    metadata, entries = _split(_parse_json(bytes(data[_LENGTH_BYTES:start])))
    # Every entry is read, also one that a later entry replaces; only the last is placed.
    raw = {name: _read_entry(name, entry) for name, entry in entries}
    if sum(len(shape) for _, shape, _ in raw.values()) > MAX_TOTAL_DIMENSIONS:
        raise SafetensorsError(f"header too long: more than {MAX_TOTAL_DIMENSIONS} dimensions in all tensors")
    tensors = [_place(name, *fields, start) for name, fields in raw.items()]
    # An empty tensor comes before the one at the same offset.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    _check_cover(tensors, start, len(data) if file_size is None else file_size)
    return Header(metadata, tensors, start)


class _Object(List[Tuple[str, Any]]):
    """A JSON object with all its keys: a dict would silently keep one of two values of a key."""


def _parse_json(text: bytes) -> _Object:
    try:
        # `json.loads` of bytes would accept UTF-16 too.
        header = json.loads(
            str(text, "utf-8"),
            object_pairs_hook=_Object,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except SafetensorsError:
        raise
    except (ValueError, RecursionError) as error:
        raise _wrong(str(error)) from None
    if type(header) is not _Object:
        raise _wrong("expected an object of tensors by name")
    return header


def _integer(digits: str) -> object:
    """A number from 0 to 2^64 - 1; any other, -0 too, is a float to the library."""
    if digits.startswith("-") or len(digits) > 20 or int(digits) > _MAX_U64:
        return _finite(digits)
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise _wrong(f"number out of range: {text[:24]}")
    return number


def _refuse_constant(name: str) -> None:
    raise _wrong(f"{name} is no JSON")


def _split(header: _Object) -> Tuple[Optional[Dict[str, str]], _Object]:
    """The metadata, and the entries of the tensors."""
    values = [value for name, value in header if name == _METADATA]
    tensors = _Object(entry for entry in header if entry[0] != _METADATA)
    if len(values) > 1:
        raise _wrong(f"{_METADATA!r} comes twice")
    if len(tensors) > MAX_TENSORS:
        raise SafetensorsError(f"header too long: more than {MAX_TENSORS} tensors")
    metadata = _read_metadata(values[0]) if values else None
    sizes = _sizes(name for name, _ in tensors)
    if any(size > MAX_NAME_BYTES for size in sizes):
        raise SafetensorsError(f"tensor name of {max(sizes)} bytes: too long: expected at most {MAX_NAME_BYTES}")
    if sum(sizes) + sum(_sizes(text for pair in (metadata or {}).items() for text in pair)) > MAX_TEXT_BYTES:
        raise SafetensorsError(f"header too long: more than {MAX_TEXT_BYTES} bytes of names and metadata")
    return metadata, tensors


def _read_metadata(value: object) -> Optional[Dict[str, str]]:
    if value is None:
        return None
    if type(value) is not _Object or any(type(text) is not str for _, text in value):
        raise _wrong("metadata: expected an object of texts")
    if len(value) > MAX_METADATA:
        raise SafetensorsError(f"header too long: more than {MAX_METADATA} entries of metadata")
    for pair in value:
        _sizes(pair)
    return dict(value)


def _sizes(texts: Iterable[str]) -> List[int]:
    """The lengths of texts in bytes; refuses half of a surrogate pair."""
    try:
        return [len(text.encode()) for text in texts]
    except UnicodeEncodeError as error:
        raise _wrong(str(error)) from None


def _read_entry(name: str, entry: Any) -> Tuple[str, List[int], List[int]]:
    """Type, shape and offsets of a tensor, not compared with each other yet."""
    shown = f"tensor {name[:64]!r}"
    # The library also reads the three values without their names.
    values = _fields(shown, entry) if type(entry) is _Object else _list(entry)
    if len(values) != len(_FIELDS):
        raise _wrong(f"{shown}: expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = values
    # So does its derived code with a type that is an object: `{"F32": null}`.
    if type(dtype) is _Object and [value for _, value in dtype] == [None]:
        dtype = dtype[0][0]
    if type(dtype) is not str or not _are_numbers(shape) or not _are_numbers(offsets) or len(offsets) != 2:
        raise _wrong(f"{shown}: expected a text, a list of numbers and two numbers from 0 to {_MAX_U64}")
    if dtype not in BITS:
        raise SafetensorsError(f"{shown}: unknown element type {dtype[:16]!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise SafetensorsError(
            f"{shown}: too many dimensions: expected at most {MAX_DIMENSIONS}, found {len(shape)}"
        )
    return dtype, cast("List[int]", shape), cast("List[int]", offsets)


def _list(value: Any) -> List[Any]:
    """A JSON list; an empty one for any other value."""
    return value if type(value) is list else []


def _fields(shown: str, entry: _Object) -> List[Any]:
    """The values of the known fields, in their order."""
    known: Dict[str, Any] = {}
    for key, value in entry:
        if key not in _FIELDS:
            _check_unknown(shown, key, value)
        elif key in known:
            raise _wrong(f"{shown}: {key!r} comes twice")
        else:
            known[key] = value
    return [known[field] for field in _FIELDS if field in known]


def _check_unknown(shown: str, key: str, value: Any) -> None:
    """Refuses a value that the library cannot keep until it knows its field."""
    _sizes([key])
    left: List[Tuple[Any, int]] = [(value, 0)]
    while left:
        each, depth = left.pop()
        if type(each) is str:
            _sizes([each])
        elif isinstance(each, list):
            if depth >= _MAX_UNKNOWN_DEPTH:
                raise _wrong(f"{shown}: lists or objects in more than {_MAX_UNKNOWN_DEPTH} others")
            left += [(element, depth + 1) for element in _elements(each)]


def _elements(value: Any) -> Iterable[Any]:
    """The elements of a list, or the keys and values of an object."""
    return (part for pair in value for part in pair) if type(value) is _Object else value


def _are_numbers(value: object) -> bool:
    return type(value) is list and all(type(element) is int for element in cast("List[object]", value))


def _place(name: str, dtype: str, shape: List[int], offsets: List[int], start: int) -> FileTensor:
    size, shown = size_bytes(dtype, shape), f"tensor {name[:64]!r}"
    if size is None:
        raise SafetensorsError(f"{shown}: shape {_shown(shape)} of {dtype} takes no whole number of bytes below 2^64")
    begin, end = offsets
    if end - begin != size or start + end > _MAX_U64:
        raise SafetensorsError(f"{shown}: wrong size: expected {size} bytes by its shape, found {begin} to {end}")
    return FileTensor(name, dtype, tuple(shape), start + begin, size)


def size_bytes(dtype: str, shape: Sequence[int]) -> Optional[int]:
    """The size of a tensor; `None` if it overflows or is not a whole number of bytes. As in the library, an overflow
    before a dimension of zero is one."""
    elements = 1
    for length in shape:
        elements *= length
        if elements > _MAX_U64:
            return None
    bits = elements * BITS[dtype]
    return None if bits % 8 or bits > _MAX_U64 else bits // 8


def _shown(shape: List[int]) -> str:
    return str(shape) if len(shape) <= 8 else f"of {len(shape)} dimensions"


def _check_cover(tensors: List[FileTensor], start: int, file_size: int) -> None:
    """Checks that the tensors cover the data exactly once."""
    place = start
    for tensor in tensors:
        if tensor.offset != place:
            raise SafetensorsError(
                f"tensor {tensor.name[:64]!r}: wrong offset in the data: expected {place - start}, "
                f"found {tensor.offset - start}"
            )
        place += tensor.size
    if place != file_size:
        raise SafetensorsError(f"the tensors end at byte {place} of the file, which has {file_size}")


def _wrong(reason: str) -> SafetensorsError:
    return SafetensorsError(f"wrong header: {reason}")
