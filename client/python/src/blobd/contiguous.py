"""One contiguous GGUF out of many blobs, in address space.

A range of addresses is reserved. Its first pages hold the file's header with other tensor offsets
and another `general.alignment`. After them each blob is mapped at a page boundary, so the memory is
the page cache's and is shared with all processes that use the blobs. Only the header is copied, and
tensors that do not start at a page boundary of their blob, such as small experts packed together.

If a tensor does not fill its last page, the rest of the page is zeros, or the bytes that follow the
tensor in its blob. It is padding, which readers of GGUF skip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

from ._memory import PAGE_BYTES, Blob, Reservation
from ._responses import Tensor
from .errors import GgufError, ModelError, SessionClosedError
from .gguf import Header, TensorInfo, parse

if TYPE_CHECKING:
    from types import TracebackType

ALIGNMENT = max(4096, PAGE_BYTES)
"""The alignment of tensors in a contiguous GGUF, so that each has its own pages."""

# Half of what a process on x86-64 can address: no real model is larger.
_MAX_BYTES = 1 << 46


class ContiguousGguf:
    """A GGUF in one range of addresses; a context manager that releases the range.

    Views of `buffer`, for instance NumPy arrays, keep the memory mapped after that; an engine that
    has only `address` must be done with it before.
    """

    def __init__(self, buffer: memoryview, address: int, plan: Plan) -> None:
        self._buffer: Optional[memoryview] = buffer
        self._address = address
        self._plan = plan

    @property
    def buffer(self) -> memoryview:
        """The whole GGUF, read-only."""
        if self._buffer is None:
            raise SessionClosedError("contiguous gguf: closed; make another one")
        return self._buffer

    @property
    def address(self) -> int:
        """Its start in memory, for an engine that takes a pointer."""
        if self._buffer is None:
            raise SessionClosedError("contiguous gguf: closed; make another one")
        return self._address

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self._plan.size

    @property
    def header_bytes(self) -> int:
        """The length of the header, which is in this process's own memory."""
        return len(self._plan.header)

    @property
    def copied_bytes(self) -> int:
        """How many bytes of tensors had to be copied into this process's own memory."""
        return sum(place.tensor.size for place in self._plan.places if not place.is_mapped)

    def __len__(self) -> int:
        return self.size

    def __buffer__(self, flags: int) -> memoryview:
        # Called since Python 3.12; before that, programs use `buffer`.
        return self.buffer

    def close(self) -> None:
        """Releases the memory, which is unmapped with its last view. May be called twice."""
        self._buffer = None

    def __enter__(self) -> ContiguousGguf:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Place:
    """The location of a tensor."""

    tensor: Tensor
    start: int
    """The offset of its first byte in the contiguous GGUF."""

    @property
    def is_mapped(self) -> bool:
        """Whether its blob's pages can be mapped: only if it starts at a page boundary."""
        return self.tensor.offset % PAGE_BYTES == 0


@dataclass(frozen=True)
class Plan:
    """The header and the location of each tensor."""

    header: bytes
    places: Tuple[Place, ...]
    size: int


def assemble(header: memoryview, tensors: Sequence[Tensor], blobs: Sequence[Blob]) -> ContiguousGguf:
    """Maps or copies a file's header and all of its tensors into one range."""
    planned = plan(parse(header), tensors)
    reservation = Reservation(planned.size)
    try:
        reservation.copy(0, memoryview(planned.header))
        for place in planned.places:
            _fill(reservation, place, blobs)
        buffer = reservation.finish(planned.size)
    except BaseException:
        reservation.release()
        raise
    return ContiguousGguf(buffer, reservation.address, planned)


def plan(header: Header, tensors: Sequence[Tensor]) -> Plan:
    """The rewritten header, and the location of each tensor that has bytes.

    Tensors follow each other in the order of the header, each padded to the alignment and without
    other gaps, so readers that compute the offsets get the same ones.
    """
    ordered = _in_order(header.tensors, tensors)
    offsets: List[int] = []
    end = 0
    for tensor in ordered:
        offsets.append(end)
        end += _padded(tensor.size)
    if end > _MAX_BYTES:
        raise GgufError(f"gguf: {end} bytes of tensors, at most {_MAX_BYTES} can be addressed; verify the model")
    rewritten = header.rewritten(ALIGNMENT, offsets)
    places = (Place(tensor, len(rewritten) + offset) for tensor, offset in zip(ordered, offsets))
    return Plan(rewritten, tuple(place for place in places if place.tensor.size), len(rewritten) + end)


def _in_order(declared: Sequence[TensorInfo], tensors: Sequence[Tensor]) -> List[Tensor]:
    """The tensors in the order in which the header declares them."""
    by_name: Dict[str, Tensor] = {tensor.name: tensor for tensor in tensors}
    ordered: List[Tensor] = []
    for info in declared:
        name = info.name.decode("utf-8", "replace")
        tensor = by_name.get(name)
        if tensor is None:
            raise ModelError(f"tensor {name}: not opened; open the model without a selection of tensors")
        if tensor.shape != info.shape:
            raise GgufError(f"gguf: tensor {name} has shape {info.shape}, the daemon says {tensor.shape}; verify it")
        ordered.append(tensor)
    if not len(ordered) == len(by_name) == len(tensors):
        raise GgufError(f"gguf: {len(ordered)} tensors, the daemon says {len(tensors)}; verify the model")
    return ordered


def _fill(reservation: Reservation, place: Place, blobs: Sequence[Blob]) -> None:
    tensor = place.tensor
    if tensor.fd is None:
        return
    blob = blobs[tensor.fd]
    if place.is_mapped:
        blob.map_into(reservation, place.start, tensor.offset, tensor.size)
    else:
        reservation.copy(place.start, blob.slice(tensor.offset, tensor.size))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
