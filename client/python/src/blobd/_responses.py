"""The daemon's responses, validated.

The daemon is not trusted: every field has its type and range checked here once, and numbers that
refer to each other are compared. Whether the files of the descriptors are long enough is checked
when one is mapped. Unknown fields are ignored, as the protocol requires.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, TypeVar, cast

from .errors import DaemonError, ProtocolError, daemon_error
from .types import Experts, HeaderLocation, ModelSummary, OpenLayer, TensorFormat, TensorLocation, Version

MAX_LAYERS = 4096
"""The most layers accepted."""
MAX_TENSORS = 1 << 20
"""The most tensors accepted, of all layers together; a GGUF file has 131,072 at most."""
MAX_FDS = MAX_TENSORS + 2 * MAX_LAYERS
"""The most descriptors accepted: one per tensor, and some for headers and whole files."""


class Tensor(TensorLocation):
    """A tensor of an open model and the location of its bytes. It is not mapped yet."""

    def expert_range(self, index: int) -> Tuple[int, int]:
        """Start and end of one expert in bytes from the tensor's start. Maps nothing.

        Raises `IndexError` if the tensor is not a stack or has no expert with this number.
        """
        if self.experts is None or not 0 <= index < self.experts.count:
            count = self.experts.count if self.experts else 0
            raise IndexError(f"tensor {self.name}: no expert {index}, it has {count}")
        start = index * self.experts.stride
        return start, start + self.experts.stride


class Layer(OpenLayer):
    """One file of an open model."""

    @property
    def header_fd(self) -> Optional[int]:
        """The number of the descriptor that is its GGUF header, if it is a split file."""
        return self.header.fd if self.header else None

    @property
    def header_size(self) -> int:
        """The length of that header with its padding, in bytes."""
        return self.header.size if self.header else 0

    @property
    def component(self) -> str:
        """Its role: `model`, `projector`, `template`, `params`, `license`, …"""
        return component(self.media_type)


@dataclass(frozen=True)
class Head:
    """The first frame of the response to an open."""

    name: str
    digest: str
    layers: Tuple[Layer, ...]
    tensor_count: int
    fd_count: int


_OLLAMA_PREFIX = "application/vnd.ollama.image."
_MODEL_PACK_PREFIXES = ("application/vnd.cncf.model.", "application/vnd.cnai.model.")
_COMPONENTS = {
    "application/vnd.docker.container.image.v1+json": "config",
    "application/vnd.oci.image.config.v1+json": "config",
    "application/vnd.oci.empty.v1+json": "config",
    "application/vnd.docker.ai.model.config.v0.1+json": "config",
    "application/vnd.docker.ai.model.config.v0.2+json": "config",
    "application/vnd.docker.ai.model.config.v1+json": "config",
    "application/vnd.docker.ai.gguf.v3": "model",
    "application/vnd.docker.ai.safetensors": "model",
    "application/vnd.docker.ai.dduf": "model",
    "application/vnd.docker.ai.mmproj": "projector",
    "application/vnd.docker.ai.license": "license",
    "application/vnd.docker.ai.chat.template.jinja": "template",
    "application/vnd.docker.ai.model.file": "file",
    "application/vnd.docker.ai.model.file.v1+gguf": "model",
}


def component(media_type: str) -> str:
    """The role of a file of this media type in its model."""
    known = _COMPONENTS.get(media_type)
    if known is not None:
        return known
    for prefix in _MODEL_PACK_PREFIXES:
        if media_type.startswith(prefix):
            kind, version, _ = media_type[len(prefix) :].partition(".v1")
            return "model" if version and kind == "weight" else kind
    if media_type.startswith(_OLLAMA_PREFIX):
        return media_type[len(_OLLAMA_PREFIX) :]
    return media_type


def as_object(value: Any, what: str) -> Dict[str, Any]:
    """A JSON object; `what` is its name in errors."""
    if type(value) is not dict:
        raise ProtocolError(f"{what} is no object")
    return cast("Dict[str, Any]", value)


def as_list(value: Any, what: str) -> List[object]:
    """A JSON list; `what` is its name in errors."""
    if type(value) is not list:
        raise ProtocolError(f"{what} is no list")
    return cast("List[object]", value)


Response = TypeVar("Response", Version, ModelSummary, Experts)


class Fields:
    """The fields of a JSON object, read with type checks; `what` is the object's name in errors."""

    def __init__(self, what: str, value: object) -> None:
        self.what = what
        self._fields = as_object(value, what)

    def text(self, name: str) -> str:
        """A field that is text."""
        value: str = self._of_type(name, str)
        return value

    def optional_text(self, name: str) -> Optional[str]:
        """A field that is text, absent or null."""
        return None if self._fields.get(name) is None else self.text(name)

    def number(self, name: str, limit: int = (1 << 64) - 1) -> int:
        """A whole number from 0 to `limit`."""
        value: int = self._of_type(name, int)
        if isinstance(value, bool) or not 0 <= value <= limit:
            raise ProtocolError(f"{self.what}: {name} is not a number from 0 to {limit}")
        return value

    def optional_number(self, name: str) -> Optional[int]:
        """A whole number, absent or null."""
        return None if self._fields.get(name) is None else self.number(name)

    def items(self, name: str) -> List[Any]:
        """A field that is a list."""
        value: List[Any] = self._of_type(name, list)
        return value

    def flag(self, name: str) -> bool:
        """A field that is true or false; false if absent."""
        return name in self._fields and bool(self._of_type(name, bool))

    def object(self, name: str) -> Optional[Fields]:
        """A field that is an object, absent or null."""
        value = self._fields.get(name)
        return None if value is None else Fields(f"{self.what}: {name}", value)

    def read(self, kind: Type[Response]) -> Response:
        """A dataclass of texts, numbers and truth values."""
        readers: Dict[str, Callable[[str], Any]] = {
            "str": self.text,
            "int": self.number,
            "bool": self.flag,
            "Optional[str]": self.optional_text,
            "Optional[int]": self.optional_number,
        }
        return kind(**{name: readers[annotation](name) for name, annotation in kind.__annotations__.items()})

    def _of_type(self, name: str, kind: type) -> Any:
        value = self._fields.get(name)
        if not isinstance(value, kind):
            raise ProtocolError(f"{self.what}: {name} is no {_KIND_NAMES[kind]}")
        return value


_KIND_NAMES: Dict[type, str] = {str: "text", int: "number", list: "list", bool: "truth value"}


def read_error(value: object) -> DaemonError:
    """The error in a response or a frame."""
    fields = value if isinstance(value, Fields) else Fields("error", value)
    hint, request = fields.optional_text("hint"), fields.optional_text("request")
    return daemon_error(fields.text("code"), fields.text("message"), hint, request)


def read_version(value: object) -> Version:
    """The response to `GET /v1/version`."""
    return Fields("version", value).read(Version)


def read_models(value: object) -> List[ModelSummary]:
    """The response to `GET /v1/models`."""
    return [Fields("model", model).read(ModelSummary) for model in Fields("models", value).items("models")]


def read_head(value: object) -> Head:
    """The `open` frame."""
    fields = Fields("open", value)
    layers = fields.items("layers")
    if len(layers) > MAX_LAYERS:
        raise ProtocolError(f"{len(layers)} layers announced, at most {MAX_LAYERS} allowed")
    fd_count = fields.number("fd_count", MAX_FDS)
    return Head(
        name=fields.text("name"),
        digest=fields.text("digest"),
        layers=tuple(_read_layer(number, layer, fd_count) for number, layer in enumerate(layers)),
        tensor_count=fields.number("tensor_count", MAX_TENSORS),
        fd_count=fd_count,
    )


def _read_layer(number: int, value: object, fd_count: int) -> Layer:
    fields = Fields(f"layer {number}", value)
    if fields.optional_number("piece_count"):
        raise ProtocolError(f"layer {number}: pieces announced that were not requested")
    header = fields.object("header")
    return Layer(
        media_type=fields.text("media_type"),
        name=fields.optional_text("name"),
        digest=fields.text("digest"),
        size=fields.number("size"),
        fd=_read_fd(fields, fd_count),
        format=cast("Optional[TensorFormat]", fields.optional_text("format")),
        header=_read_header(header, fd_count) if header else None,
        piece_count=0,
    )


def _read_header(fields: Fields, fd_count: int) -> Optional[HeaderLocation]:
    fd = _read_fd(fields, fd_count)
    return None if fd is None else HeaderLocation(fd, fields.number("size"))


def _read_fd(fields: Fields, fd_count: int) -> Optional[int]:
    fd = fields.optional_number("fd")
    if fd is not None and fd >= fd_count:
        raise ProtocolError(f"{fields.what}: descriptor {fd} is beyond the {fd_count} announced")
    return fd


def read_tensors(values: List[object], head: Head) -> List[Tensor]:
    """The entries of a `tensors` frame."""
    return [_read_plain_tensor(value, head) or _read_tensor(value, head) for value in values]


def _read_plain_tensor(value: Any, head: Head) -> Optional[Tensor]:
    """A tensor whose entry is beyond doubt; `None` leaves all others to `_read_tensor`, which names what is wrong.

    A model may have tens of thousands of tensors: reading each field with its own error takes five times as long.
    """
    if type(value) is not dict or value.get("experts") is not None:
        return None
    name, kind, shape, layer = value.get("name"), value.get("type"), value.get("shape"), value.get("layer")
    fd, offset, size = value.get("fd"), value.get("offset", 0), value.get("size")
    if not (type(name) is type(kind) is str and type(shape) is list):
        return None
    if not type(layer) is type(fd) is type(offset) is type(size) is int:
        return None
    for length in shape:
        if type(length) is not int or length < 0:
            return None
    if not (0 <= layer < len(head.layers) and 0 <= fd < head.fd_count and offset >= 0 <= size):
        return None
    if offset + size >= 1 << 64:
        return None
    tensor: Tensor = object.__new__(Tensor)
    # The fields of a frozen dataclass, set at once: its constructor sets each with a call.
    tensor.__dict__.update(
        name=name, type=kind, shape=tuple(shape), layer=layer, fd=fd, offset=offset, size=size, experts=None
    )
    return tensor


def _read_tensor(value: object, head: Head) -> Tensor:
    name = Fields("tensor", value).text("name")
    fields = Fields(f"tensor {name!r}", value)
    shape = tuple(fields.items("shape"))
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ProtocolError(f"{fields.what}: shape is not a list of numbers")
    tensor = Tensor(
        name=name,
        type=fields.text("type"),
        shape=shape,
        layer=fields.number("layer"),
        size=fields.number("size"),
        fd=_read_fd(fields, head.fd_count),
        offset=fields.optional_number("offset") or 0,
        experts=_read_experts(fields),
    )
    _check_tensor(tensor, head)
    return tensor


def _read_experts(fields: Fields) -> Optional[Experts]:
    experts = fields.object("experts")
    return experts.read(Experts) if experts else None


def _check_tensor(tensor: Tensor, head: Head) -> None:
    problem = None
    if tensor.layer >= len(head.layers):
        problem = "no such layer"
    elif tensor.fd is None and tensor.size > 0:
        problem = "bytes without a descriptor"
    elif tensor.offset + tensor.size >= 1 << 64:
        problem = "ends beyond 2^64"
    elif tensor.experts and tensor.experts.count * tensor.experts.stride != tensor.size:
        problem = "its experts do not add up to its size"
    if problem:
        raise ProtocolError(f"tensor {tensor.name!r}: {problem}")
