"""The tensors in the headers of a model's layers: their names, and how they are quantised.

The parts of a quantised tensor `T` are `T.scale`, `T.bias` and `T.global_scale` in its file, and
`T_scale`, `T_qbias` and `T_global_scale` here. In models of February 2026, each of them is a separate
layer with that name. The rules are those of Ollama and of blobd's Rust client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from .errors import NoTensorError, WeightsError
from .safetensors import BITS, FileTensor, Header

MAX_TENSORS = 1 << 18
"""The most tensors of a model, including parts. Layers that refer to the same file many times can
declare any number of them."""

# The suffix in a file, and the suffix here.
_PARTS = ((".scale", "_scale"), (".bias", "_qbias"), (".global_scale", "_global_scale"))
# The name of the only tensor in a file of January 2026.
_LEGACY_KEY = "data"
# Bits of an element and default group size. The group size of types with block scales is fixed.
_TYPES = {
    "int4": (4, 64),
    "int8": (8, 64),
    "nvfp4": (4, 16),
    "mxfp4": (4, 32),
    "mxfp8": (8, 32),
    "q4": (4, 64),
    "q8": (8, 64),
    "fp4": (4, 64),
    "fp8": (8, 64),
}
_ALIASES = {"q4": "int4", "fp4": "int4", "q8": "int8", "fp8": "int8"}
_GROUP_SIZES = (16, 32, 64, 128)
# The types in which quantised elements are packed.
_PACKED = frozenset({"U8", "I8", "U16", "U32", "I32", "U64"})
_BYTE_SCALES = frozenset({"U8", "F8_E8M0", "F8_E4M3"})


@dataclass(frozen=True)
class Quantization:
    """How a tensor or a model is quantised, as far as it is known."""

    quant_type: Optional[str] = None
    """The type: `int4`, `int8`, `nvfp4`, `mxfp4`, `mxfp8`, …"""
    group_size: Optional[int] = None
    """How many elements of a row share a scale."""

    @property
    def bits(self) -> Optional[int]:
        """The bits of a packed element; `None` if the type is unknown."""
        row = self._row()
        return row and row[0]

    def or_default_size(self) -> Quantization:
        """With the default group size of its type, if it has none."""
        row = self._row()
        return self if self.group_size or not row else Quantization(self.quant_type, row[1])

    def _row(self) -> Optional[Tuple[int, int]]:
        return _TYPES.get(_lower(self.quant_type)) if self.quant_type else None


@dataclass(frozen=True)
class Weight:
    """One tensor, or a part of a quantised one. It is not mapped yet."""

    name: str
    """Its name among the opened tensors."""
    dtype: str
    """The name of its element type in the file; that of packed elements is `U32`."""
    shape: Tuple[int, ...]
    """Its dimensions in the file, the slowest first."""
    size: int
    """Its length in bytes."""
    layer: int
    """The number of the layer whose file contains it."""
    offset: int
    """Where it starts in that file."""
    is_part: bool
    """Whether it is a scale or bias in the file of its tensor."""
    declared: Quantization
    """What its file declares for it."""
    layer_name: str
    """The name of the layer that contains it."""


class TensorLayers:
    """The tensors and groups in the layers of a model, or of one of its components."""

    def __init__(self, component: str) -> None:
        self.component = component
        self.tensors: Dict[str, Weight] = {}
        self.groups: Dict[str, List[str]] = {}
        # As declared by the first file that declares a type; if none does, by the first that declares a size.
        self._declared = Quantization()

    def includes(self, layer: str) -> bool:
        """Whether a layer belongs to the component."""
        return not self.component or layer.startswith(self.component + "/")

    def add(self, layer: str, number: int, header: Header) -> None:
        """Adds the tensors of a layer; `number` is that of the layer with its file."""
        if self._declared.quant_type is None:
            declared = _declared(header)
            if declared.quant_type or self._declared.group_size is None:
                self._declared = declared
        file = _File(header, layer, number)
        key = self._tensor_key(file)
        if key is None:
            self._add_group(file)
            return
        name = _strip(layer, self.component)
        self._add_tensor(file, key, name)
        for suffix, _ in _PARTS:
            # A bias without a scale is a tensor of its own.
            if not file.has_scale(key):
                self._insert(file, key + suffix, name + suffix, False)

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor with this name has a scale."""
        return name + "_scale" in self.tensors

    def is_part(self, name: str) -> bool:
        """Whether this is a scale or bias of another tensor, in its file or in a separate layer."""
        tensor = self.tensors.get(name)
        if tensor and tensor.is_part:
            return True
        bases = (name[: -len(suffix)] for _, suffix in _PARTS if name.endswith(suffix))
        return any(base in self.tensors and self.is_quantized(base) for base in bases)

    def quantization(self, index: Quantization) -> Quantization:
        """How the model is quantised; `index` is what `model_index.json` says. Type and size always come
        from one source."""
        if self._declared.quant_type:
            return self._declared.or_default_size()
        if index.bits:
            return index.or_default_size()
        inferred = self._infer_from_separate_scales()
        if inferred:
            size = index.group_size if index.quant_type is None else None
            return Quantization(inferred, size).or_default_size()
        if index.quant_type is None and self._declared.group_size:
            return self._declared
        return index.or_default_size()

    def quantization_of(self, name: str, model: Quantization) -> Optional[Quantization]:
        """How this tensor is quantised; `None` if it has no scale. `model` is how the model is quantised."""
        tensor, scale = self.tensors.get(name), self.tensors.get(name + "_scale")
        if tensor is None or scale is None:
            return None
        declared = tensor.declared
        if declared.quant_type is None:
            inferred = _infer(tensor, scale, name + "_qbias" in self.tensors, model)
            return inferred if inferred.quant_type else declared
        size = declared.group_size
        if size is None and declared.bits and not _lower(declared.quant_type).startswith(("nv", "mx")):
            size = _group_size(tensor, scale, declared.bits)
        return Quantization(declared.quant_type, size).or_default_size()

    def _tensor_key(self, file: _File) -> Optional[str]:
        """The name in the file of the tensor that the layer is named after; `None` for a group."""
        layer = file.layer
        keys = [_strip(layer, self.component), layer]
        if "/" in layer:
            # Even if all components are open, the names in a file may lack their component.
            keys.append(layer.partition("/")[2])
        keys.append(_LEGACY_KEY)
        return next((key for key in keys if file.header.tensor(key)), None)

    def _add_tensor(self, file: _File, key: str, name: str) -> None:
        if file.has_scale(key):
            for suffix, api_suffix in _PARTS:
                self._insert(file, key + suffix, name + api_suffix, True)
        self._insert(file, key, name, False)

    def _add_group(self, file: _File) -> None:
        members: List[str] = []
        for tensor in file.header.tensors:
            if not file.is_part(tensor.name):
                name = self._member_name(tensor.name, file.layer)
                self._add_tensor(file, tensor.name, name)
                members.append(name)
        self.groups[_strip(file.layer, self.component)] = members

    def _member_name(self, key: str, layer: str) -> str:
        component, slash, _ = layer.partition("/")
        if not self.component and slash and component:
            return f"{component}/{_strip(key, component)}"
        return _strip(key, self.component)

    def _insert(self, file: _File, key: str, name: str, is_part: bool) -> None:
        tensor = file.header.tensor(key)
        if tensor is None:
            return
        if len(self.tensors) >= MAX_TENSORS:
            raise WeightsError(f"model: more than {MAX_TENSORS} tensors in its layers")
        known = self.tensors.get(name)
        if known:
            raise WeightsError(f'tensor "{name}": in layer "{known.layer_name}" and in layer "{file.layer}"')
        self.tensors[name] = _weight(file, tensor, name, is_part)

    def _infer_from_separate_scales(self) -> Optional[str]:
        """From the first scale in a layer of its own, as Ollama did in February 2026: without a bias, a type
        with block scales; otherwise by the ratio of the sizes of weight and scale."""
        for name in sorted(self.tensors):
            base, scale = name[: -len("_scale")], self.tensors[name]
            weight = self.tensors.get(base) if name.endswith("_scale") else None
            if weight is None or weight.layer_name == scale.layer_name:
                continue
            if scale.size == 0:
                return None
            if base + "_qbias" not in self.tensors:
                block = _infer_block_scales(weight, scale).quant_type
                return block.upper() if block else "NVFP4"
            return "Q4" if weight.size // scale.size < 12 else "Q8"
        return None


class _File:
    """The header of a layer's file."""

    def __init__(self, header: Header, layer: str, number: int) -> None:
        self.header = header
        self.layer = layer
        self.number = number

    def has_scale(self, key: str) -> bool:
        return self.header.tensor(key + ".scale") is not None

    def is_part(self, name: str) -> bool:
        """A part has no parts: `T.scale.scale` is a tensor of its own."""
        depth, whole = 0, self._whole_of(name)
        while whole is not None:
            depth, whole = depth + 1, self._whole_of(whole)
        return depth % 2 == 1

    def _whole_of(self, name: str) -> Optional[str]:
        for suffix, _ in _PARTS:
            whole = name[: -len(suffix)]
            if name.endswith(suffix) and self.header.tensor(whole) and self.has_scale(whole):
                return whole
        return None


def quantization_of_index(index: object) -> Quantization:
    """What `model_index.json` says about the model."""
    if type(index) is not dict:
        return Quantization()
    quant_type, size = index.get("quantization"), index.get("group_size")
    if type(size) is str:
        size = _group_size_of(size)
    is_size = type(size) is int and 0 < size < 1 << 32
    return Quantization(quant_type if type(quant_type) is str and quant_type else None, size if is_size else None)


def missing(name: str, model: str, members: Optional[List[str]]) -> Exception:
    """The error for a name that is not that of a tensor; `members` are those of the group with this name."""
    if members is None:
        return NoTensorError(f'model {model}: no tensor "{name}"; ManifestWeights.names lists its tensors')
    example = f', such as "{members[0]}"' if members else ""
    return WeightsError(f'"{name}" is a group of tensors; request one of them{example}', "invalid_request")


def _strip(name: str, component: str) -> str:
    """The name without the component, if it starts with it."""
    prefix = component + "/"
    return name[len(prefix) :] if component and name.startswith(prefix) else name


def _weight(file: _File, tensor: FileTensor, name: str, is_part: bool) -> Weight:
    return Weight(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        size=tensor.size,
        layer=file.number,
        offset=tensor.offset,
        is_part=is_part,
        declared=_declared_for(file.header, tensor.name),
        layer_name=file.layer,
    )


def _declared(header: Header, prefix: str = "") -> Quantization:
    quant_type = header.metadata.get(prefix + "quant_type") or None
    return Quantization(quant_type, _group_size_of(header.metadata.get(prefix + "group_size", "")))


def _declared_for(header: Header, name: str) -> Quantization:
    """What a file declares for a tensor; if nothing, what it declares for all. The size for all is not that
    of a tensor that has another type."""
    own, of_all = _declared(header, name + "."), _declared(header)
    is_other = own.quant_type and of_all.quant_type and not _is_same(own.quant_type, of_all.quant_type)
    size = own.group_size or (None if is_other else of_all.group_size)
    return Quantization(own.quant_type or of_all.quant_type, size)


def _group_size_of(text: str) -> Optional[int]:
    digits = re.fullmatch(r"\+?0*([0-9]{1,10})", text, re.ASCII)
    size = int(digits[1]) if digits else 0
    return size if 0 < size < 1 << 32 else None


def _is_same(first: str, second: str) -> bool:
    first, second = _lower(first), _lower(second)
    return _ALIASES.get(first, first) == _ALIASES.get(second, second)


def _lower(name: str) -> str:
    """Lower case of ASCII letters only: the lower case of some other letters is an ASCII letter."""
    return name.lower() if name.isascii() else name


def _infer(weight: Weight, scale: Weight, has_bias: bool, model: Quantization) -> Quantization:
    """Scales of one byte tell a type with block scales; otherwise the shapes decide. They give one group
    size for 4 bits and half of it for 8 bits; a declared size leaves only that one."""
    if not has_bias and scale.dtype in _BYTE_SCALES:
        return _infer_block_scales(weight, scale)
    declared = weight.declared.group_size
    sizes = {bits: _group_size(weight, scale, bits) for bits in (4, 8)}
    four, eight = (None if declared not in (None, size) else size for size in sizes.values())
    hint_says_8_bits = "8" in (model.quant_type or "")
    of_model = {4: four, 8: eight}.get(model.bits or 0)
    if of_model and of_model == model.group_size:
        bits, size = model.bits, of_model
    elif four == 32:
        bits, size = 4, four
    elif eight == 64 or eight and (not four or hint_says_8_bits):
        bits, size = 8, eight
    elif four:
        bits, size = 4, four
    else:
        return Quantization()
    if bits == 8:
        return Quantization("int8", size)
    return Quantization("nvfp4" if size == 16 and not has_bias else "int4", size)


def _infer_block_scales(weight: Weight, scale: Weight) -> Quantization:
    four, eight = _group_size(weight, scale, 4), _group_size(weight, scale, 8)
    if scale.dtype in _BYTE_SCALES:
        if four == 16 and scale.dtype != "F8_E8M0":
            return Quantization("nvfp4", 16)
        if four == 32 and scale.dtype != "F8_E4M3":
            return Quantization("mxfp4", 32)
        if eight == 32 and scale.dtype != "F8_E4M3":
            return Quantization("mxfp8", 32)
    return Quantization()


def _group_size(weight: Weight, scale: Weight, bits: int) -> Optional[int]:
    """How many elements of `bits` share a scale; `None` for a size that no model uses."""
    columns = weight.shape[-1] if weight.shape else 0
    groups = scale.shape[-1] if scale.shape else 0
    if not columns or not groups or not _packs(weight.dtype, bits):
        return None
    elements = columns * (BITS[weight.dtype] // bits)
    size, rest = divmod(elements, groups)
    return size if rest == 0 and size in _GROUP_SIZES and elements < 1 << 64 else None


def _packs(dtype: str, bits: int) -> bool:
    """Whether elements of `bits` are packed in numbers of this type."""
    return dtype in _PACKED or dtype.startswith(("F", "BF")) and BITS[dtype] == bits
