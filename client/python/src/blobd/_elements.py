"""Tensors of safetensors files as arrays and tensors, without a copy.

NumPy and PyTorch are imported only when one is needed. NumPy itself has 13 of the 22 types; `ml_dtypes`, if
it is installed, adds BF16 and the 8-bit floats. PyTorch has all types but the two of six bits.
"""

from __future__ import annotations

import importlib
from typing import Any, Dict, Sequence, Tuple

from ._slices import resolve
from .errors import DtypeError, ModelError, SliceError
from .safetensors import BITS

# NumPy's type, and the name of the type in PyTorch and in `ml_dtypes`.
_TYPES: Dict[str, Tuple[str, str]] = {
    "BOOL": ("?", "bool"),
    "U8": ("u1", "uint8"),
    "I8": ("i1", "int8"),
    "U16": ("<u2", "uint16"),
    "I16": ("<i2", "int16"),
    "F16": ("<f2", "float16"),
    "U32": ("<u4", "uint32"),
    "I32": ("<i4", "int32"),
    "F32": ("<f4", "float32"),
    "U64": ("<u8", "uint64"),
    "I64": ("<i8", "int64"),
    "F64": ("<f8", "float64"),
    "C64": ("<c8", "complex64"),
    "BF16": ("", "bfloat16"),
    "F8_E5M2": ("", "float8_e5m2"),
    "F8_E4M3": ("", "float8_e4m3fn"),
    "F8_E8M0": ("", "float8_e8m0fnu"),
    "F8_E4M3FNUZ": ("", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("", "float8_e5m2fnuz"),
    "F4": ("", "float4_e2m1fn_x2"),
    "F6_E2M3": ("", ""),
    "F6_E3M2": ("", ""),
}
_BYTES_INSTEAD = 'take its bytes: `blobd.open(REF)["NAME"]`'


class NumpyElements:
    """Tensors as read-only NumPy arrays."""

    def __init__(self) -> None:
        self._numpy = import_library("numpy", "NumPy arrays")

    def whole(self, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> Any:
        """A view of all of a tensor."""
        kind = self._type(name, dtype)
        array = self._numpy.frombuffer(data if len(data) else bytearray(), dtype=kind)
        array.flags.writeable = False
        return array.reshape(tuple(shape))

    def part(self, name: str, dtype: str, shape: Sequence[int], data: memoryview, index: Any) -> Any:
        """A part of a tensor: a view if its elements are next to each other, else a copy."""
        # With the ellipsis, an index of numbers alone gives an array without dimensions and not a scalar.
        view = self.whole(name, dtype, shape, data)[(*resolve(name, index, shape), ...)]
        return view if view.flags.c_contiguous else view.copy()

    def _type(self, name: str, dtype: str) -> Any:
        kind, other = _TYPES[dtype]
        if kind:
            return self._numpy.dtype(kind)
        if other and BITS[dtype] % 8 == 0:
            try:
                return self._numpy.dtype(getattr(importlib.import_module("ml_dtypes"), other))
            except (ImportError, AttributeError):
                raise _missing(
                    name, dtype, "NumPy", f'install ml_dtypes, open the model with framework="pt", or {_BYTES_INSTEAD}'
                ) from None
        instead = f'open the model with framework="pt", or {_BYTES_INSTEAD}' if other else _BYTES_INSTEAD
        raise _missing(name, dtype, "NumPy", instead)


class TorchElements:
    """Tensors as PyTorch tensors; those on the CPU are views, which must not be written to."""

    def __init__(self, device: object) -> None:
        self._torch = import_library("torch", "PyTorch tensors")
        self._device = self._torch.device(device)

    def whole(self, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> Any:
        """All of a tensor: a view on the CPU, a copy on another device."""
        return self._placed(self._view(name, dtype, shape, data))

    def part(self, name: str, dtype: str, shape: Sequence[int], data: memoryview, index: Any) -> Any:
        """A part of a tensor: on the CPU, a view if its elements are next to each other, else a copy."""
        view = self._view(name, dtype, shape, data)
        if dtype != "F4":
            return self._placed(_indexed(name, view, index).contiguous())
        # PyTorch has no operations on two numbers in a byte.
        pairs = view.view(self._torch.uint8)
        part = pairs[(*_index_of_pairs(name, resolve(name, index, shape)), ...)].contiguous()
        return self._placed(part.view(self._type(name, dtype)))

    def _view(self, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> Any:
        kind, torch = self._type(name, dtype), self._torch
        if dtype == "F4":
            shape = _shape_of_pairs(name, shape)
        if len(data) == 0:
            return torch.empty(tuple(shape), dtype=kind)
        return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(tuple(shape))

    def _placed(self, tensor: Any) -> Any:
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _type(self, name: str, dtype: str) -> Any:
        kind = _TYPES[dtype][1]
        if not kind:
            raise _missing(name, dtype, "PyTorch", _BYTES_INSTEAD)
        try:
            return getattr(self._torch, kind)
        except AttributeError:
            version = f"PyTorch {self._torch.__version__}"
            raise _missing(name, dtype, version, f"install a newer one, or {_BYTES_INSTEAD}") from None


def import_library(name: str, purpose: str) -> Any:
    """NumPy or PyTorch; `purpose` is what needs it, in the error if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(f"{purpose}: {error}; `pip install {name}`, or use the plain buffer") from error


def _indexed(name: str, view: Any, index: Any) -> Any:
    try:
        return view[index]
    except (IndexError, TypeError, ValueError) as error:
        raise SliceError(f"tensor {name!r}: index {index!r:.64}: {error}; see get_shape()") from error


def _shape_of_pairs(name: str, shape: Sequence[int]) -> Tuple[int, ...]:
    """PyTorch counts pairs of 4-bit numbers in the last dimension."""
    if not shape or shape[-1] % 2:
        raise DtypeError(
            f"tensor {name!r}: last dimension of F4: expected an even length for PyTorch, found shape {list(shape)}; "
            f"{_BYTES_INSTEAD}"
        )
    return (*shape[:-1], shape[-1] // 2)


def _index_of_pairs(name: str, index: Tuple[Any, ...]) -> Tuple[Any, ...]:
    last = index[-1]
    if type(last) is not slice or last.start % 2 or last.stop % 2 or last.step != 1:
        raise DtypeError(
            f"tensor {name!r}: last index of F4: expected a slice from an even to an even number, found {last}; "
            "slice another dimension"
        )
    return (*index[:-1], slice(last.start // 2, last.stop // 2))


def _missing(name: str, dtype: str, library: str, instead: str) -> DtypeError:
    return DtypeError(f"tensor {name!r}: {library} has no type for {dtype}; {instead}")
