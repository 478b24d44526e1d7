"""The tensors of a model that has one layer per tensor, by name and without a copy.

Ollama's models for image generation and for MLX have no GGUF file. Their manifest has one layer per
tensor, or per group of experts, and each is a small safetensors file. `ManifestWeights` reads all forms
of these files that Ollama has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple, Union

from . import safetensors
from ._tensor_layers import Quantization, TensorLayers, Weight, missing, quantization_of_index
from .errors import SafetensorsError, WeightsError
from .model import OpenModel

if TYPE_CHECKING:
    from types import TracebackType

MODEL_INDEX = "model_index.json"
MAX_JSON_BYTES = 128 << 20
"""The longest JSON file that is read. Tokenizers are the longest of a model, at about 35 MiB."""


class ManifestWeights(Mapping[str, memoryview]):
    """The tensors of an open model, or of one of its components.

    It is a `Mapping` of all tensors and parts of quantised tensors to their bytes, read-only, as they are
    stored. The names of a component's tensors do not contain the component; if none is requested, names
    start with their component, as in `text_encoder/model.norm.weight`. `T_scale`, `T_qbias` and
    `T_global_scale` are the parts of a quantised tensor `T`.
    """

    def __init__(self, model: OpenModel, component: str = "") -> None:
        """Raises `WeightsError` if the model, or the component, has no tensor layer, or one that is not a
        valid safetensors file."""
        self._model = model
        self._layers = TensorLayers(component.rstrip("/"))
        self._files: Dict[int, memoryview] = {}
        self._read_layers()
        index = quantization_of_index(self.json(MODEL_INDEX))
        found = self._layers.quantization(index)
        quant_type = None if found.quant_type is None else found.quant_type.upper()
        self._quantization = Quantization(quant_type, found.group_size)
        self._sorted = sorted(self._layers.tensors)

    @property
    def names(self) -> List[str]:
        """The sorted names of tensors, their parts and groups."""
        return sorted({*self._layers.tensors, *self._layers.groups})

    @property
    def component(self) -> str:
        """The requested component; empty for all."""
        return self._layers.component

    @property
    def components(self) -> List[str]:
        """The sorted names of the model's components, whichever is requested."""
        return sorted({name.partition("/")[0] for _, name in self._tensor_layers() if "/" in name})

    @property
    def model(self) -> OpenModel:
        """The open model, with its lease and its other files."""
        return self._model

    @property
    def quantization(self) -> Optional[str]:
        """How the model is quantised, in capital letters (`INT4`, `NVFP4`, `Q8`, …): as the first file that
        declares it says, else as `model_index.json` says, else as inferred from scales in separate layers."""
        return self._quantization.quant_type

    @property
    def group_size(self) -> Optional[int]:
        """How many elements share a scale: as the source of `quantization` says, else its type's default."""
        return self._quantization.group_size

    def quantization_of(self, name: str) -> Optional[Quantization]:
        """How this tensor is quantised; `None` if it has no scale and is therefore not quantised.

        In order of precedence: what its file declares for this tensor, what the file declares for all its
        tensors, what the shapes and types of the tensor and its scale imply, the type's default size.
        """
        return self._layers.quantization_of(name, self._quantization)

    def is_part(self, name: str) -> bool:
        """Whether this is a scale or bias of another tensor."""
        return self._layers.is_part(name)

    def group(self, name: str) -> Optional[List[str]]:
        """The names of a group's tensors, in the order of its file; `None` if there is no such group."""
        members = self._layers.groups.get(name)
        return None if members is None else list(members)

    def has(self, name: str) -> bool:
        """Whether there is a tensor, a part or a group with this name."""
        return name in self._layers.tensors or name in self._layers.groups

    def tensor(self, name: str) -> Weight:
        """The tensor or part with this name; maps nothing. Raises `NoTensorError`, and `WeightsError` for
        the name of a group."""
        tensor = self._layers.tensors.get(name)
        if tensor is None:
            raise missing(name, self._model.name, self._layers.groups.get(name))
        return tensor

    def map(self, tensor: Union[str, Weight]) -> memoryview:
        """A tensor's bytes, read-only, as they are stored."""
        weight = self.tensor(tensor) if isinstance(tensor, str) else tensor
        return self._files[weight.layer][weight.offset : weight.offset + weight.size]

    def expert(self, tensor: Union[str, Weight], index: int) -> memoryview:
        """One element of the slowest dimension, such as an expert of a stack. `IndexError` if there is none."""
        weight = self.tensor(tensor) if isinstance(tensor, str) else tensor
        count = weight.shape[0] if weight.shape else 0
        if not 0 <= index < count:
            raise IndexError(f"tensor {weight.name}: no expert {index}, it has {count}")
        stride = weight.size // count
        return self.map(weight)[index * stride : (index + 1) * stride]

    def json(self, path: str) -> Any:
        """A JSON file of the model by its path, such as `tokenizer/tokenizer_config.json`; `None` if the
        model has no such file."""
        for number, layer in enumerate(self._model.layers):
            if layer.component == "json" and layer.name == path:
                return _parse_json(path, self._model.layer_bytes(number))
        return None

    def close(self) -> None:
        """Closes the model; mappings stay."""
        self._model.close()

    def __getitem__(self, name: str) -> memoryview:
        return self.map(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, name: object) -> bool:
        return name in self._layers.tensors

    def __eq__(self, other: object) -> bool:
        # By identity: comparing two models byte by byte would read all of both.
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        of = f" {self.component}" if self.component else ""
        return f"<blobd.ManifestWeights {self._model.name}{of}: {len(self)} tensors>"

    def __enter__(self) -> ManifestWeights:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def _tensor_layers(self) -> Iterator[Tuple[int, str]]:
        for number, layer in enumerate(self._model.layers):
            if layer.component == "tensor" and layer.name is not None:
                yield number, layer.name

    def _read_layers(self) -> None:
        """Reads the headers of all tensor layers of the component, each file once."""
        headers: Dict[str, Tuple[int, safetensors.Header]] = {}
        for number, name in self._tensor_layers():
            if not self._layers.includes(name):
                continue
            digest = self._model.layers[number].digest
            if digest not in headers:
                headers[digest] = number, self._read_header(number, name)
            self._layers.add(name, *headers[digest])
        if not self._layers.tensors:
            component = self.component
            of = f' of component "{component}"' if component else ""
            hint = "open the model without a component to see its components"
            hint = hint if component else "if it is a GGUF model, open it with Client.open"
            raise WeightsError(f"model {self._model.name}: no layer is a tensor{of}; {hint}", "not_found")

    def _read_header(self, number: int, name: str) -> safetensors.Header:
        self._files[number] = self._model.layer_bytes(number)
        try:
            header = safetensors.parse(self._files[number])
            header.check_printable()
            return header
        except SafetensorsError as error:
            raise WeightsError(f'layer "{name}": safetensors: {error}; run `blobd verify`') from None


def _parse_json(path: str, data: memoryview) -> Any:
    if len(data) > MAX_JSON_BYTES:
        raise WeightsError(f'file "{path}": too long: expected at most {MAX_JSON_BYTES} bytes, found {len(data)}')
    try:
        return json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f'file "{path}": {error}') from None
