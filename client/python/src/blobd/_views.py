"""Views of the tensors of GGUF files for NumPy and PyTorch, which are imported only when one is needed."""

from __future__ import annotations

from math import prod
from typing import Any, Dict, Tuple

from ._elements import import_library
from ._responses import Tensor
from .errors import ModelError, ProtocolError

# The ggml type, NumPy's name and PyTorch's name. NumPy has no bfloat16: its view shows the bits.
_NATIVE: Dict[str, Tuple[str, str]] = {
    "F32": ("f4", "float32"),
    "F16": ("f2", "float16"),
    "BF16": ("u2", "bfloat16"),
    "F64": ("f8", "float64"),
    "I8": ("i1", "int8"),
    "I16": ("i2", "int16"),
    "I32": ("i4", "int32"),
    "I64": ("i8", "int64"),
}


def numpy_view(tensor: Tensor, data: memoryview, order: str) -> Any:
    """A read-only array over `data`, whose numbers have this byte order."""
    numpy = import_library("numpy", "NumPy views")
    kind, _ = _NATIVE.get(tensor.type, ("u1", ""))
    array = numpy.frombuffer(data if data else bytearray(), dtype=numpy.dtype(order + kind))
    array.flags.writeable = False
    return array.reshape(_view_shape(tensor, numpy.dtype(kind).itemsize))


def torch_view(tensor: Tensor, data: memoryview, order: str) -> Any:
    """A tensor over `data`, which must not be written to."""
    torch = import_library("torch", "PyTorch views")
    native, kind = _NATIVE.get(tensor.type, ("", "uint8"))
    if order == ">" and native[1:] not in ("", "1"):
        raise ModelError(f"tensor {tensor.name}: big-endian, which PyTorch does not have; use numpy")
    dtype = getattr(torch, kind)
    shape = _view_shape(tensor, int(native[1:] or 1))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _view_shape(tensor: Tensor, item_bytes: int) -> Tuple[int, ...]:
    """The slowest dimension first; for a quantised type, the fastest is a row's length in bytes."""
    slowest_first = tensor.shape[::-1]
    if tensor.type in _NATIVE:
        if prod(slowest_first) * item_bytes != tensor.size:
            raise ProtocolError(f"tensor {tensor.name!r}: {tensor.size} bytes do not fit its shape {tensor.shape}")
        return slowest_first
    rows = slowest_first[:-1]
    row_count = prod(rows)
    if row_count == 0 or tensor.size % row_count:
        return (tensor.size,)
    return (*rows, tensor.size // row_count)
