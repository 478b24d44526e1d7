"""The header of a safetensors file, checked.

In a `Header`, a tensor's size is its shape times its type, the tensors cover the data without gap or
overlap, and names are unique. The rules and limits are those of the daemon.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from .errors import SafetensorsError

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is read: the limit of the `safetensors` library."""
MAX_TENSORS = 131_072
"""The most tensors of a file."""
MAX_DIMENSIONS = 1024
"""The most dimensions of a tensor."""
MAX_NAME_BYTES = 1024
"""The longest name of a tensor, in bytes."""

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
_LENGTH_BYTES = 8
_MAX_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file."""

    name: str
    """Its key in the header."""
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

    def __init__(self, metadata: Dict[str, str], tensors: List[FileTensor]) -> None:
        self.metadata = metadata
        """The metadata."""
        self.tensors = tuple(tensors)
        """The tensors, in the order of their data."""
        self._by_name = {tensor.name: tensor for tensor in tensors}

    def tensor(self, name: str) -> Optional[FileTensor]:
        """The tensor with this name."""
        return self._by_name.get(name)


def parse(data: memoryview) -> Header:
    """Reads the header of a whole file. Raises `SafetensorsError` if it is not a valid one."""
    if len(data) < _LENGTH_BYTES:
        raise SafetensorsError(f"incomplete: expected a header of {_LENGTH_BYTES} bytes, found {len(data)}")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise SafetensorsError(f"header too long: expected at most {MAX_HEADER_BYTES} bytes, found {length}")
    start = _LENGTH_BYTES + length
    if start > len(data):
        raise SafetensorsError(f"incomplete: expected a header of {start} bytes, found {len(data)}")
    raw = _parse_json(bytes(data[_LENGTH_BYTES:start]))
    metadata = raw.pop(_METADATA, {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise _wrong("metadata: expected an object of texts")
    if len(raw) > MAX_TENSORS:
        raise SafetensorsError(f"more than {MAX_TENSORS} tensors")
    tensors = [_read_tensor(name, entry, start) for name, entry in raw.items()]
    # An empty tensor comes before the one at the same offset.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    _check_cover(tensors, start, len(data))
    return Header(metadata, tensors)


def _parse_json(text: bytes) -> Dict[str, Any]:
    try:
        # `json.loads` of bytes would accept UTF-16 too.
        header = json.loads(
            str(text, "utf-8"), object_pairs_hook=_unique, parse_int=_unsigned, parse_constant=_refuse_constant
        )
    except SafetensorsError:
        raise
    except (ValueError, RecursionError) as error:
        raise _wrong(str(error)) from None
    if type(header) is not dict:
        raise _wrong("expected an object of tensors by name")
    return header


def _unique(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    """A dict would silently keep one of two values of a key, and other readers might keep the other."""
    fields: Dict[str, Any] = {}
    for name, value in pairs:
        # Half of a surrogate pair raises a `ValueError`.
        name.encode()
        if type(value) is str:
            value.encode()
        if name in fields:
            raise _wrong(f"{name[:64]!r} comes twice")
        fields[name] = value
    return fields


def _unsigned(digits: str) -> int:
    # Longer ones are above 2^64, and converting them takes long.
    if digits.startswith("-") or len(digits) > 20 or int(digits) > _MAX_U64:
        raise _wrong(f"number: expected 0 to {_MAX_U64}, found {digits[:24]}")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise _wrong(f"{name} is no JSON")


def _read_tensor(name: str, entry: Any, start: int) -> FileTensor:
    _check_name(name)
    shown = f"tensor {name!r}"
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _wrong(f"{shown}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or not _are_numbers(shape) or not _are_numbers(offsets) or len(offsets) != 2:
        raise _wrong(f"{shown}: expected a text, a list of numbers and two numbers")
    if dtype not in BITS:
        raise SafetensorsError(f"{shown}: unknown element type {dtype[:16]!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise SafetensorsError(
            f"{shown}: too many dimensions: expected at most {MAX_DIMENSIONS}, found {len(shape)}"
        )
    size = _size(dtype, shape)
    if size is None:
        raise SafetensorsError(f"{shown}: shape {shape} of {dtype} is not a whole number of bytes")
    begin, end = offsets
    if end - begin != size or start + end > _MAX_U64:
        raise SafetensorsError(f"{shown}: wrong size: expected {size} bytes by its shape, found {begin} to {end}")
    return FileTensor(name, dtype, tuple(shape), start + begin, size)


def _check_name(name: str) -> None:
    length, problem = len(name.encode()), None
    if length == 0:
        problem = "is empty"
    elif length > MAX_NAME_BYTES:
        problem = "too long"
    elif any(letter < " " or "\x7f" <= letter < "\xa0" for letter in name):
        problem = "has control characters"
    if problem:
        raise SafetensorsError(f"tensor name of {length} bytes: {problem}")


def _are_numbers(value: object) -> bool:
    return type(value) is list and all(type(element) is int for element in value)


def _size(dtype: str, shape: List[int]) -> Optional[int]:
    """The size of a tensor; `None` if it overflows or is not a whole number of bytes."""
    # Without this, thousands of dimensions would make a number of megabytes.
    if 0 in shape:
        return 0
    elements = 1
    for length in shape:
        elements *= length
        if elements > _MAX_U64:
            return None
    bits = elements * BITS[dtype]
    return None if bits % 8 or bits // 8 > _MAX_U64 else bits // 8


def _check_cover(tensors: List[FileTensor], start: int, file_size: int) -> None:
    """Checks that the tensors cover the data exactly once."""
    place = start
    for tensor in tensors:
        if tensor.offset != place:
            raise SafetensorsError(
                f"tensor {tensor.name!r}: wrong offset in the data: expected {place - start}, "
                f"found {tensor.offset - start}"
            )
        place += tensor.size
    if place != file_size:
        raise SafetensorsError(f"the tensors end at byte {place} of the file, which has {file_size}")


def _wrong(reason: str) -> SafetensorsError:
    return SafetensorsError(f"wrong header: {reason}")
