"""An open model: its tensors in memory, its files as bytes.

An `OpenModel` has received everything it needs; only `tensor_digests` sends another request to the
daemon. It holds the connection, which is the lease: while it is open, the daemon lists the model as
in use and evicts nothing of it.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Set, Tuple, Union

from . import _views
from ._elements import NumpyElements, TorchElements
from ._memory import Blob, max_open_files
from ._responses import Fields, Head, Layer, Tensor, as_list, read_head, read_tensors
from ._wire import Wire
from .contiguous import ContiguousGguf, assemble
from .errors import ModelError, NoTensorError, ProtocolError, SessionClosedError
from .gguf import parse
from .metadata import Metadata
from .types import ModelDetails

if TYPE_CHECKING:
    from types import TracebackType

Details = Callable[[str, str], ModelDetails]
"""Requests the details of a model, by name and manifest digest."""


class OpenModel(Mapping[str, memoryview]):
    """An open model; `close`, the end of a `with` block or its garbage collection ends the lease.

    It is a `Mapping`: `model["output.weight"]` is that tensor's bytes, read-only, without a copy.
    Mapped memory stays valid when the model is closed, when the daemon stops, and when the model is
    removed from the store. Writing to it by other means, such as `ctypes`, kills the process.
    """

    def __init__(
        self, head: Head, tensors: List[Tensor], blobs: List[Blob], lease: socket.socket, details: Details
    ) -> None:
        self._head = head
        self._tensors = tuple(tensors)
        # In reverse, so that the first of several with one name is kept.
        self._by_name = {tensor.name: tensor for tensor in reversed(tensors)}
        self._blobs = blobs
        self._details = details
        self._release = weakref.finalize(self, _release, lease, blobs)

    @property
    def name(self) -> str:
        """The shortest name that was unique when the model was opened."""
        return self._head.name

    @property
    def digest(self) -> str:
        """The manifest's digest: the model's ID."""
        return self._head.digest

    @property
    def layers(self) -> Tuple[Layer, ...]:
        """The model's files, the configuration first."""
        return self._head.layers

    @property
    def tensors(self) -> Tuple[Tensor, ...]:
        """The selected tensors, layer by layer in file order. They are not mapped yet."""
        return self._tensors

    @property
    def closed(self) -> bool:
        """Whether the lease has ended."""
        return not self._release.alive

    def tensor(self, name: str) -> Tensor:
        """The tensor with this name. If several layers have one, such as a model and its draft
        model, it is the first; `tensors` has all."""
        try:
            return self._by_name[name]
        except KeyError:
            raise NoTensorError(f"model {self.name}: no tensor {name!r}; `tensors` lists those opened") from None

    def __getitem__(self, name: str) -> memoryview:
        return self.map(name)

    def __iter__(self) -> Iterator[str]:
        return reversed(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __eq__(self, other: object) -> bool:
        # By identity: comparing two models byte by byte would read all of both.
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<blobd.OpenModel {self.name}: {len(self._tensors)} tensors{state}>"

    def map(self, tensor: Union[str, Tensor]) -> memoryview:
        """A tensor's bytes, read-only. Tensors that share a blob share its mapping."""
        tensor = self._resolve(tensor)
        return self._slice(tensor.fd, tensor.offset, tensor.size)

    def expert(self, tensor: Union[str, Tensor], index: int) -> memoryview:
        """One expert of a stack, read-only. `IndexError` if there is no such expert."""
        tensor = self._resolve(tensor)
        start, end = tensor.expert_range(index)
        return self._slice(tensor.fd, tensor.offset + start, end - start)

    def numpy(self, tensor: Union[str, Tensor]) -> Any:
        """A read-only NumPy view without a copy, the slowest dimension first.

        Of a GGUF file, quantised types, which NumPy lacks, become rows of `uint8`, BF16 becomes `uint16`. Of a
        safetensors file, they are as from `safe_open`.
        """
        tensor = self._resolve(tensor)
        if self._is_safetensors(tensor):
            return NumpyElements().whole(tensor.name, tensor.type, tensor.shape, self.map(tensor))
        return _views.numpy_view(tensor, self.map(tensor), self._byte_order(tensor.layer))

    def torch(self, tensor: Union[str, Tensor]) -> Any:
        """A PyTorch view without a copy, the slowest dimension first; quantised types as `uint8` rows.

        PyTorch has no read-only tensors and warns about that once: writing to this one kills the
        process. Clone it before you change it.
        """
        tensor = self._resolve(tensor)
        if self._is_safetensors(tensor):
            return TorchElements("cpu").whole(tensor.name, tensor.type, tensor.shape, self.map(tensor))
        return _views.torch_view(tensor, self.map(tensor), self._byte_order(tensor.layer))

    def header(self, layer: Optional[int] = None) -> memoryview:
        """The header of a split file: all bytes before its data section. Without a number, that of the first
        GGUF file that has one."""
        number = self._gguf_layer() if layer is None else layer
        header = self.layers[self._described(number)]
        if header.header_fd is None:
            raise ModelError(f"layer {number}: no header: the file is stored whole")
        return self._slice(header.header_fd, 0, header.header_size)

    def metadata(self, layer: Optional[int] = None) -> Metadata:
        """The metadata in the header of a split GGUF file, by key and type. Without a number, that of the first
        file that has one; of a sharded model, that is the shard with the metadata of all."""
        return Metadata(parse(self.header(layer)))

    def layer_bytes(self, layer: int) -> memoryview:
        """The bytes of a layer that is stored whole: a template, parameters, a licence."""
        whole = self._layer(layer)
        if whole.fd is None and whole.size > 0:
            raise ModelError(f"layer {layer}: stored in pieces; use `blobd export` or `contiguous`")
        return self._slice(whole.fd, 0, whole.size)

    def text(self, component: str) -> Optional[str]:
        """The text of the first layer with this role (`template`, `params`, `license`, …), or `None`
        if there is none."""
        for number, layer in enumerate(self.layers):
            if layer.component == component:
                try:
                    return str(self.layer_bytes(number), "utf-8")
                except UnicodeDecodeError:
                    raise ModelError(f"layer {number}: not UTF-8 text; use layer_bytes") from None
        return None

    def tensor_digests(self) -> Dict[str, str]:
        """The digest of the blob that holds each tensor, by the tensor's name. Sends a request.

        If several tensors have one name and different digests, the name is omitted.
        """
        digests: Dict[str, str] = {}
        clashing: Set[str] = set()
        for entry in Fields("model", self._details(self.name, self.digest)).items("tensors"):
            fields = Fields("tensor", entry)
            name, digest = fields.text("name"), fields.text("digest")
            if name in self._by_name and digests.setdefault(name, digest) != digest:
                clashing.add(name)
        return {name: digest for name, digest in digests.items() if name not in clashing}

    def contiguous(self, layer: Optional[int] = None) -> ContiguousGguf:
        """A split file as one GGUF in one range of addresses, for engines that take a buffer.

        Use it in a `with` block. It is a valid GGUF with the file's metadata and tensors, but not the
        file bit for bit: its tensors start at page boundaries, and `general.alignment` is the page
        size. Its pages are those of the blobs; tensors that do not start at a page boundary of their
        blob are copied. Without a number, the first split file is used.
        """
        number = self._gguf_layer() if layer is None else layer
        self._check_open()
        described = self._described(number)
        in_layer = [tensor for tensor in self._tensors if tensor.layer == described]
        return assemble(self.header(number), in_layer, self._blobs)

    def fd(self, number: int) -> Optional[int]:
        """The descriptor with this number in the tensor table, for an engine that maps or reads itself.

        It belongs to the model. `None` if it is closed: when a model has more descriptors than half
        of what this process may have open (`ulimit -n`), each is mapped on arrival and closed.
        """
        return self._blob(number).fd

    def close(self) -> None:
        """Ends the lease and closes the descriptors; mappings stay. May be called twice."""
        self._release()

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def _resolve(self, tensor: Union[str, Tensor]) -> Tensor:
        return self.tensor(tensor) if isinstance(tensor, str) else tensor

    def _slice(self, fd: Optional[int], offset: int, size: int) -> memoryview:
        self._check_open()
        return memoryview(b"") if fd is None or size == 0 else self._blob(fd).slice(offset, size)

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosedError(f"model {self.name}: closed; open it again")

    def _blob(self, number: int) -> Blob:
        if not 0 <= number < len(self._blobs):
            raise ModelError(f"descriptor {number}: no such descriptor, the model has {len(self._blobs)}")
        return self._blobs[number]

    def _layer(self, number: int) -> Layer:
        if not 0 <= number < len(self.layers):
            raise ModelError(f"layer {number}: no such layer, the model has {len(self.layers)}")
        return self.layers[number]

    def _described(self, number: int) -> int:
        """The number of the layer that has header and tensors of this layer's file: the first with the same
        digest. A manifest may name a file several times, and the daemon describes it once."""
        digest = self._layer(number).digest
        return next(place for place, layer in enumerate(self.layers) if layer.digest == digest)

    def _gguf_layer(self) -> int:
        for number, layer in enumerate(self.layers):
            if layer.header_fd is not None and layer.format != "safetensors":
                return number
        raise ModelError(
            f"model {self.name}: no GGUF header; none of its files opened is a split GGUF file; "
            "for safetensors files use safe_open"
        )

    def _is_safetensors(self, tensor: Tensor) -> bool:
        return self._layer(tensor.layer).format == "safetensors"

    def _byte_order(self, layer: int) -> str:
        """`<` or `>`: in a big-endian file the first two bytes of the version are zero."""
        if self._layer(layer).header_fd is None:
            return "<"
        return ">" if bytes(self.header(layer)[4:6]) == b"\0\0" else "<"


def receive(wire: Wire, details: Details) -> OpenModel:
    """Receives the whole response to an open; the connection becomes the lease."""
    head = read_head(wire.expect("open"))
    tensors: List[Tensor] = []
    while len(tensors) < head.tensor_count:
        part = as_list(wire.expect("tensors"), "tensors")
        left = head.tensor_count - len(tensors)
        if not 0 < len(part) <= left:
            raise ProtocolError(f"tensors in one frame: expected 1 to {left}, found {len(part)}")
        tensors.extend(read_tensors(part, head))
    blobs = _receive_blobs(wire, head.fd_count)
    lease = wire.detach()
    return OpenModel(head, tensors, blobs, lease, details)


def _receive_blobs(wire: Wire, fd_count: int) -> List[Blob]:
    keep_open = fd_count <= max_open_files() // 2
    blobs: List[Blob] = []
    try:
        while len(blobs) < fd_count:
            first = len(blobs)
            batch = wire.batch(first, fd_count)
            blobs.extend(Blob(first + place, fd) for place, fd in enumerate(batch))
            if not keep_open:
                for blob in blobs[first:]:
                    blob.map_and_close()
    except BaseException:
        for blob in blobs:
            blob.close()
        raise
    return blobs


def _release(lease: socket.socket, blobs: List[Blob]) -> None:
    lease.close()
    for blob in blobs:
        blob.close()
