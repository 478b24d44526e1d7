"""The metadata of a GGUF header, by key and type.

Most keys of a model start with its architecture: `llama.block_count`. `Metadata` takes them without
it. A value of another type than the requested one, even of another integer width, counts as missing.
The rules are those of Ollama and of blobd's Rust client.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from .gguf import Header, read_values

Scalar = Union[bool, int, float, str, bytes]
Value = Union[Scalar, List[bool], List[int], List[float], List[Union[str, bytes]]]

UNKNOWN = "unknown"
"""The name of an architecture that the header does not have."""

_STRING = 8
_ARRAY = 9
_NAMES = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    8: "string",
    10: "uint64",
    11: "int64",
    12: "float64",
}
# The letters of `struct` for values of a fixed size; a bool is a byte, and all but 0 are true.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Range:
    """The smallest and the largest number of a value."""

    min: int
    """The smallest."""
    max: int
    """The largest."""


class Metadata(Mapping[str, Value]):
    """The metadata of a header.

    As a `Mapping`, it has the keys as the file has them: `metadata["llama.block_count"]`. All methods
    take keys without the architecture: `metadata.get_as("block_count", "uint32")`.

    Text that is not UTF-8 is `bytes` in a `Mapping`, and counts as missing elsewhere; a key that is not UTF-8 is
    left out.
    """

    def __init__(self, header: Header) -> None:
        self._data = header.metadata
        self._order = header.order
        self._places: Dict[str, Tuple[int, int]] = {}
        for name, kind, place in read_values(header):
            try:
                # Of two values for one key, which no file in the store has, the first counts.
                self._places.setdefault(str(name, "utf-8"), (kind, place))
            except UnicodeDecodeError:
                continue
        self._parameter_count = sum(tensor.element_count for tensor in header.tensors)
        architecture = self.get_as("general.architecture", "string")
        self._architecture = architecture if isinstance(architecture, str) else UNKNOWN

    def __getitem__(self, key: str) -> Value:
        kind, place = self._places[key]
        return self._decode(kind, place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def full_key(self, key: str) -> str:
        """The key as the file has it: keys that start with `general.` or `tokenizer.` are unchanged, all
        others get the architecture in front."""
        if key.startswith(("general.", "tokenizer.")):
            return key
        return f"{self._architecture}.{key}"

    def type_of(self, key: str) -> Optional[str]:
        """The type of a value: `uint32`, `string`, `array<uint32>`, …; `None` if the key is missing."""
        known = self._places.get(self.full_key(key))
        return None if known is None else self._type_name(*known)

    def get_as(self, key: str, type_name: str, default: Any = None) -> Any:
        """The value of a key if it has exactly this type, such as `uint32`, `string` or `array<float32>`;
        else the default. Strings of an array that are not UTF-8 are left out."""
        if self.type_of(key) != type_name:
            return default
        value = self[self.full_key(key)]
        if isinstance(value, list):
            return [element for element in value if not isinstance(element, bytes)]
        return default if isinstance(value, bytes) else value

    def range(self, key: str) -> Optional[Range]:
        """Minimum and maximum of a `uint32`, or of an array of `uint32` or `int32`, as many keys are a number
        or one number per block. An empty array counts as missing. A negative number is read as unsigned."""
        number = self.get_as(key, "uint32")
        if number is not None:
            return Range(number, number)
        numbers = self.get_as(key, "array<uint32>") or self.get_as(key, "array<int32>")
        if not numbers:
            return None
        return Range(min(numbers) % (1 << 32), max(numbers) % (1 << 32))

    @property
    def architecture(self) -> str:
        """The model's architecture, such as `llama`; `unknown` if the header has none."""
        return self._architecture

    @property
    def kind(self) -> str:
        """What the file is, such as `model` or `adapter`: `general.type`, else `unknown`."""
        return str(self.get_as("general.type", "string", UNKNOWN))

    @property
    def parameter_count(self) -> int:
        """The number of elements of all tensors in the header, whatever `general.parameter_count` says."""
        return self._parameter_count

    @property
    def file_type(self) -> Optional[int]:
        """llama.cpp's number of the file type, if it is above 0: Ollama takes 0 for unknown."""
        return self._number("general.file_type") or None

    @property
    def block_count(self) -> int:
        """The number of blocks; 0 if missing."""
        return self._number("block_count")

    @property
    def context_length(self) -> int:
        """The longest context for which the model was trained, in tokens; 0 if missing."""
        return self._number("context_length")

    @property
    def embedding_length(self) -> int:
        """The length of an embedding; 0 if missing."""
        return self._number("embedding_length")

    @property
    def head_count(self) -> Range:
        """The fewest and the most attention heads of a block; 1 if missing."""
        return self.range("attention.head_count") or Range(1, 1)

    @property
    def head_count_kv(self) -> Range:
        """The fewest and the most key and value heads of a block; 1 if missing."""
        return self.range("attention.head_count_kv") or Range(1, 1)

    @property
    def head_size_max(self) -> int:
        """The largest size of a head in elements: the embedding length divided by the fewest heads; 0 if there
        are none."""
        heads = self.head_count.min
        return self.embedding_length // heads if heads else 0

    @property
    def head_size_k(self) -> int:
        """The size of a key head in elements: `attention.key_length`, else `head_size_max`."""
        return int(self.get_as("attention.key_length", "uint32", self.head_size_max))

    @property
    def head_size_v(self) -> int:
        """The size of a value head in elements: `attention.value_length`, else `head_size_max`."""
        return int(self.get_as("attention.value_length", "uint32", self.head_size_max))

    @property
    def chat_template(self) -> Optional[str]:
        """The template of a chat, in Jinja."""
        template = self.get_as("tokenizer.chat_template", "string")
        return template if isinstance(template, str) else None

    def _number(self, key: str) -> int:
        return int(self.get_as(key, "uint32", 0))

    def _type_name(self, kind: int, place: int) -> str:
        if kind != _ARRAY:
            return _NAMES[kind]
        return f"array<{_NAMES[self._unpack('I', place)[0]]}>"

    def _decode(self, kind: int, place: int) -> Value:
        if kind == _STRING:
            return self._text(place)[0]
        if kind != _ARRAY:
            scalar: Scalar = self._numbers(kind, place, 1)[0]
            return scalar
        element, count = self._unpack("IQ", place)
        start = place + 12
        if element != _STRING:
            return self._numbers(element, start, count)
        texts: List[Union[str, bytes]] = []
        for _ in range(count):
            text, start = self._text(start)
            texts.append(text)
        return texts

    def _numbers(self, kind: int, place: int, count: int) -> List[Any]:
        numbers = self._unpack(f"{count}{_FORMATS[kind]}", place)
        return [number != 0 for number in numbers] if _NAMES[kind] == "bool" else list(numbers)

    def _text(self, place: int) -> Tuple[Union[str, bytes], int]:
        start = place + 8
        end = start + self._unpack("Q", place)[0]
        text = self._data[start:end]
        try:
            return str(text, "utf-8"), end
        except UnicodeDecodeError:
            return text, end

    def _unpack(self, form: str, place: int) -> Tuple[Any, ...]:
        # `read_values` has walked over every value, so all of it is there.
        return struct.unpack_from(self._order + form, self._data, place)
