"""Parts of tensors, as `safetensors.safe_open(...).get_slice` gives them."""

from __future__ import annotations

import operator
from typing import Any, List, Optional, Protocol, Sequence, Tuple

from .errors import SliceError


class Elements(Protocol):
    """Makes arrays or tensors of a library from bytes."""

    def whole(self, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> Any:
        """All of a tensor."""

    def part(self, name: str, dtype: str, shape: Sequence[int], data: memoryview, index: Any) -> Any:
        """A part of a tensor, which is in memory as a whole."""


class TensorSlice:
    """A tensor that is read in parts: `part[0]`, `part[:, 2:4]`, `part[..., 0]`, `part[()]`.

    Indexes are those of `safetensors`. With PyTorch these are PyTorch's own, lists of numbers and `None` included.
    With NumPy they are numbers, slices with positive steps and one ellipsis; indexes beyond a dimension are
    errors, negative bounds of slices count from the end, and a part may be empty, which `safetensors` 0.8
    refuses. A part whose elements are next to each other is not copied on the CPU. It stays valid when the model
    is closed.
    """

    def __init__(self, name: str, dtype: str, shape: Tuple[int, ...], data: memoryview, elements: Elements) -> None:
        self._name = name
        self._dtype = dtype
        self._shape = shape
        self._data = data
        self._elements = elements

    def get_shape(self) -> List[int]:
        """The dimensions of the whole tensor, the slowest first."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The name of the element type in the file, such as `BF16`."""
        return self._dtype

    def bytes_of(self, part: Optional[slice]) -> memoryview:
        """The bytes of a part along the first dimension; those of the whole tensor for `None`."""
        if part is None or not self._shape or self._shape[0] == 0:
            return self._data
        place = resolve(self._name, part, self._shape)[0]
        row = len(self._data) // self._shape[0]
        return self._data[place.start * row : place.stop * row]

    def __getitem__(self, index: Any) -> Any:
        return self._elements.part(self._name, self._dtype, self._shape, self._data, index)

    def __repr__(self) -> str:
        return f"<blobd.TensorSlice {self._name}: {self._dtype} {list(self._shape)}>"


def resolve(name: str, index: Any, shape: Sequence[int]) -> Tuple[Any, ...]:
    """A number or a slice for each dimension, inside it."""
    parts: Tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    places = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(places) > 1:
        raise _wrong(name, "index: expected at most one ellipsis", f"{len(places)}", "write `:` for the others")
    given = len(parts) - len(places)
    if given > len(shape):
        raise _wrong(name, f"index: expected at most {len(shape)} dimensions", f"{given}", "see get_shape()")
    middle = places[0] if places else len(parts)
    every = (slice(None),) * (len(shape) - given)
    parts = (*parts[:middle], *every, *parts[middle + 1 :])
    return tuple(_resolve_one(name, axis, part, shape[axis]) for axis, part in enumerate(parts))


def _resolve_one(name: str, axis: int, part: Any, length: int) -> Any:
    subject = f"index of dimension {axis}"
    if isinstance(part, slice):
        return _resolve_slice(name, subject, part, length)
    number = _number(name, f"{subject}: expected a number, a slice or an ellipsis", part)
    if not -length <= number < length:
        raise _wrong(name, f"{subject}: expected {-length} to {length - 1}", f"{number}", "see get_shape()")
    return number % length


def _resolve_slice(name: str, subject: str, part: Any, length: int) -> slice:
    defaults = ((part.start, 0), (part.stop, length), (part.step, 1))
    start, stop, step = (
        default if value is None else _number(name, f"{subject}: expected numbers", value)
        for value, default in defaults
    )
    if step < 1:
        raise _wrong(name, f"{subject}: step: expected 1 or more", f"{step}", "reverse the result instead")
    for bound in (start, stop):
        if not -length <= bound <= length:
            raise _wrong(name, f"{subject}: bounds: expected {-length} to {length}", f"{bound}", "see get_shape()")
    start, stop = (bound + length if bound < 0 else bound for bound in (start, stop))
    return slice(start, max(start, stop), step)


def _number(name: str, problem: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong(name, problem, repr(value)[:64], "take a larger part and index that") from None


def _wrong(name: str, problem: str, found: str, advice: str) -> SliceError:
    return SliceError(f"tensor {name!r}: {problem}, found {found}; {advice}")
