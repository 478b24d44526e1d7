"""A model of safetensors files with the interface of `safetensors.safe_open`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple, Union

from . import safetensors
from ._elements import NumpyElements, TorchElements
from ._prefetch import PrefetchLoader, PrefetchPlan, planned
from ._responses import Tensor
from ._slices import Elements, TensorSlice
from .errors import NoFileError, NoTensorError, SafetensorsError, SessionClosedError, WeightsError
from .model import OpenModel

if TYPE_CHECKING:
    from types import TracebackType

_SUFFIX = ".safetensors"
_NUMPY_NAMES = ("np", "numpy")
_TORCH_NAMES = ("pt", "torch", "pytorch")
_SHOWN_NAMES = 3
_COMPARED_NAMES = 2000


@dataclass(frozen=True)
class TensorMeta:
    """What the header of a file says about a tensor."""

    dtype: str
    """The name of its element type, such as `BF16`."""
    shape: List[int]
    """Its dimensions, the slowest first."""
    data_offsets: Tuple[int, int]
    """Its first byte and the one after its last, counted from the start of the file's data."""
    file: str
    """The path of its file in the model; empty if the file has no name."""


class SafeOpen:
    """The tensors of a model of safetensors files, all under one view; see `Client.safe_open`.

    With NumPy, a tensor is a read-only array; with PyTorch on the CPU, a tensor that must not be written to: clone it
    before you change it. Both are views of the page cache, which all processes share, and stay valid when the model is
    closed. As with `safetensors.safe_open`, the other methods raise an error then.
    """

    def __init__(self, model: OpenModel, elements: Elements, file: Optional[str] = None) -> None:
        """Raises `WeightsError` if the model has no safetensors file or the same tensor in several, `NoFileError` if it
        has no file with this path."""
        self._model = model
        self._elements = elements
        self._files: Dict[int, str] = {}
        self._tensors: Dict[str, Tensor] = {}
        # Needed only for `data_offsets`, so counted only when those are asked for.
        self._starts: Dict[str, int] = {}
        by_layer: Dict[int, List[Tensor]] = {}
        for tensor in model.tensors:
            by_layer.setdefault(tensor.layer, []).append(tensor)
        layers = _weight_layers(model)
        for number in _chosen(model, layers, file):
            path = self._files[number] = layers[number]
            is_split = model.layers[number].header_fd is not None
            self._add(self._checked(by_layer.get(number, []), number, path) if is_split else self._whole(number, path))

    @property
    def model(self) -> OpenModel:
        """The open model, with its lease and its other files."""
        return self._model

    def keys(self) -> List[str]:
        """The names of all tensors, sorted."""
        self._check_open()
        return sorted(self._tensors)

    def offset_keys(self) -> List[str]:
        """The names of all tensors, file by file in the order of their data."""
        self._check_open()
        return list(self._tensors)

    def metadata(self) -> Optional[Dict[str, str]]:
        """The metadata in the header, `None` if there is none.

        Of several files, those entries that have the same value in all files that have their key.
        """
        self._check_open()
        headers = [self._header(number, path) for number, path in self._files.items()]
        found = [header.metadata for header in headers if header.has_metadata]
        if not found:
            return None
        merged = {key: value for metadata in reversed(found) for key, value in metadata.items()}
        return {
            key: value for key, value in merged.items() if all(each.get(key, value) == value for each in found)
        }

    def get_tensor(self, name: str) -> Any:
        """A whole tensor."""
        tensor = self._tensor(name)
        return self._elements.whole(name, tensor.type, tensor.shape, self._model.map(tensor))

    def get_tensors(self, names: Optional[Iterable[str]] = None) -> Dict[str, Any]:
        """Tensors by name: these, or all in the order of `offset_keys`."""
        return {name: self.get_tensor(name) for name in (self.offset_keys() if names is None else names)}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor that is read in parts: `get_slice("w")[:, :8]`."""
        return self._sliced(name, self._elements)

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Type, shape and place of a tensor; reads nothing."""
        tensor = self._tensor(name)
        start = self._start(tensor)
        path = self._files[tensor.layer]
        return TensorMeta(tensor.type, list(tensor.shape), (start, start + tensor.size), path)

    def prefetch(
        self,
        plan: Optional[Union[PrefetchPlan, Iterable[str]]] = None,
        *,
        device: Optional[Union[str, int]] = None,
        threads: int = 8,
    ) -> PrefetchLoader:
        """Asks the kernel to read tensors into memory in the background; the result gives each of them once.

        `plan` has the names of whole tensors, or each name with `None` for the whole tensor or a slice of its first
        dimension; without it, all tensors. `device` is where they go, by default that of this view. `threads` is accepted for programs written
        for `safetensors`: the kernel reads, without threads of this process.
        """
        if threads < 1:
            raise ValueError(f"threads: expected 1 or more, found {threads}; leave it out")
        names = planned(self.offset_keys() if plan is None else plan)
        elements = self._elements if device is None else self._elements_on(device)
        return PrefetchLoader({name: (self._sliced(name, elements), part) for name, part in names.items()})

    def close(self) -> None:
        """Closes the model; tensors stay."""
        self._model.close()

    def __enter__(self) -> SafeOpen:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._model.closed else ""
        return f"<blobd.SafeOpen {self._model.name}: {len(self._tensors)} tensors{state}>"

    def _elements_on(self, device: Union[str, int]) -> Elements:
        return choose_elements("numpy" if isinstance(self._elements, NumpyElements) else "pt", device)

    def _sliced(self, name: str, elements: Elements) -> TensorSlice:
        tensor = self._tensor(name)
        return TensorSlice(name, tensor.type, tensor.shape, self._model.map(tensor), elements)

    def _tensor(self, name: str) -> Tensor:
        self._check_open()
        tensor = self._tensors.get(name)
        if tensor is None:
            near = _near(name, self._tensors)
            advice = f"did you mean {_quoted(near)}?" if near else "keys() lists all"
            raise NoTensorError(f"model {self._model.name}: no tensor {name!r}; {advice}")
        return tensor

    def _start(self, tensor: Tensor) -> int:
        """The first byte of a tensor in the data of its file, which its tensors fill without a gap."""
        if not self._starts:
            ends: Dict[int, int] = {}
            for each in self._tensors.values():
                start = self._starts[each.name] = ends.get(each.layer, 0)
                ends[each.layer] = start + each.size
        return self._starts[tensor.name]

    def _check_open(self) -> None:
        if self._model.closed:
            raise SessionClosedError(f"model {self._model.name}: closed; open it again")

    def _add(self, tensors: Iterable[Tensor]) -> None:
        """Adds the tensors of a file."""
        known = self._tensors
        for tensor in tensors:
            first = known.setdefault(tensor.name, tensor)
            if first is not tensor:
                raise WeightsError(
                    f"model {self._model.name}: tensor {tensor.name!r}: expected in one file, found in "
                    f"{self._files[first.layer]!r} and {self._files[tensor.layer]!r}; choose one with file=, or a "
                    "folder that ends in a slash"
                )

    def _checked(self, tensors: List[Tensor], number: int, path: str) -> List[Tensor]:
        """Of a split file, the daemon lists the tensors in the order of their data, so the header is not read."""
        layer = self._model.layers[number]
        # Thousands of tensors have a few types and shapes.
        sizes: Dict[Tuple[str, Tuple[int, ...]], Optional[int]] = {}
        for tensor in tensors:
            kind = (tensor.type, tensor.shape)
            if kind not in sizes:
                if tensor.type not in safetensors.BITS:
                    raise WeightsError(
                        f"tensor {tensor.name!r}: unknown element type {tensor.type!r}; update the client"
                    )
                sizes[kind] = safetensors.size_bytes(tensor.type, tensor.shape)
            if sizes[kind] != tensor.size:
                raise self._contradiction(f"tensor {tensor.name!r} of {tensor.type}", sizes[kind], tensor.size)
        data = sum(tensor.size for tensor in tensors)
        if layer.header_size + data != layer.size:
            raise self._contradiction(f"data of file {path!r}", layer.size - layer.header_size, data)
        return tensors

    def _whole(self, number: int, path: str) -> Iterator[Tensor]:
        fd = self._model.layers[number].fd
        for each in self._header(number, path).tensors:
            yield Tensor(each.name, each.dtype, each.shape, number, fd, each.offset, each.size, None)

    def _header(self, number: int, path: str) -> safetensors.Header:
        layer = self._model.layers[number]
        is_whole = layer.header_fd is None
        start = self._model.layer_bytes(number) if is_whole else self._model.header(number)
        try:
            return safetensors.parse(start, layer.size)
        except SafetensorsError as error:
            raise WeightsError(f"file {path!r}: safetensors: {error}; run `blobd verify`") from None

    def _contradiction(self, subject: str, expected: Optional[int], found: int) -> WeightsError:
        return WeightsError(
            f"model {self._model.name}: {subject}: expected {expected} bytes, found {found}; run `blobd verify`",
            "corrupt",
        )


def choose_elements(framework: str, device: Union[str, int]) -> Elements:
    """What makes arrays or tensors, by the names that `safetensors` gives its frameworks."""
    if framework in _TORCH_NAMES:
        return TorchElements(device)
    if framework not in _NUMPY_NAMES:
        raise ValueError(f'framework: expected "numpy" or "pt", found {framework!r}; convert from NumPy')
    if device != "cpu":
        raise ValueError(f'device: expected "cpu" for NumPy, found {device!r}; use framework="pt"')
    return NumpyElements()


def folder_of(file: Optional[str]) -> Optional[str]:
    """The part of a model that a file is in, as a request to open names it; `None` for all."""
    folder = "" if file is None else file.rpartition("/")[0]
    return f"{folder}/" if folder else None


def _weight_layers(model: OpenModel) -> Dict[int, str]:
    """The paths of the safetensors files, by the number of their layer; a file that comes twice is one."""
    paths: Dict[int, str] = {}
    seen: Set[str] = set()
    for number, layer in enumerate(model.layers):
        if layer.component == "tensor":
            # Its file names the tensor without its component.
            continue
        path = layer.name or ""
        is_whole = layer.fd is not None and (path.endswith(_SUFFIX) or layer.media_type.endswith("safetensors"))
        if layer.digest not in seen and (layer.format == "safetensors" or is_whole):
            seen.add(layer.digest)
            paths[number] = path
    return paths


def _chosen(model: OpenModel, layers: Mapping[int, str], file: Optional[str]) -> Iterator[int]:
    if not layers:
        raise WeightsError(f"model {model.name}: no safetensors file; {_instead(model)}", "not_found")
    chosen = [
        number
        for number, path in layers.items()
        if file is None or path == file or (file.endswith("/") and path.startswith(file))
    ]
    if not chosen and file is not None:
        near = _near(file, layers.values()) or sorted(layers.values())[:_SHOWN_NAMES]
        raise NoFileError(f"model {model.name}: no safetensors file {file!r}; did you mean {_quoted(near)}?")
    return iter(chosen)


def _instead(model: OpenModel) -> str:
    if any(layer.component == "tensor" for layer in model.layers):
        return f'it has a file per tensor: open it with Client.open_weights("{model.name}")'
    if any(layer.header_fd is not None for layer in model.layers):
        return f'it is a GGUF model: use blobd.open("{model.name}"), with .numpy(NAME) or .torch(NAME)'
    return f"`blobd show {model.name}` lists its files"


def _near(name: str, names: Iterable[str]) -> List[str]:
    """Similar names, of those whose length differs least: comparing with all of a large model takes seconds."""
    candidates = sorted(names, key=lambda each: abs(len(each) - len(name)))[:_COMPARED_NAMES]
    return difflib.get_close_matches(name, candidates, _SHOWN_NAMES)


def _quoted(names: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in names)
