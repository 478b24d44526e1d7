"""The metadata of headers, by key and type."""

from __future__ import annotations

import json
import struct
import unittest
from typing import Any, Sequence

from support import HERE, gguf, string, tensor

from blobd import GgufError, Metadata, Range, block_number, split_name
from blobd.gguf import parse

UINT32, INT32, STRING, ARRAY = 4, 5, 8, 9


def key(name: bytes, kind: int, form: str, *values: Any, order: str = "<") -> bytes:
    """A key with a value of a fixed size, or with an array of them if `form` has a count."""
    return struct.pack(order + "Q", len(name)) + name + struct.pack(order + "I" + form, kind, *values)


def text(name: bytes, value: bytes) -> bytes:
    return key(name, STRING, "Q", len(value)) + value


def metadata(*keys: bytes, order: str = "<", tensors: Sequence[Any] = ()) -> Metadata:
    return Metadata(parse(memoryview(gguf(tensors, order=order, more_keys=keys))))


class Keys(unittest.TestCase):
    def test_architecture_is_in_front_of_most_keys(self) -> None:
        found = metadata(key(b"llama.block_count", UINT32, "I", 32), key(b"block_count", UINT32, "I", 7))
        self.assertEqual((found.architecture, found.block_count), ("llama", 32))
        self.assertEqual(found.full_key("x"), "llama.x")
        self.assertEqual(found.full_key("general.name"), "general.name")
        self.assertEqual(found.full_key("tokenizer.ggml.model"), "tokenizer.ggml.model")
        self.assertEqual(found["block_count"], 7)

    def test_mapping_has_all_keys_as_in_the_file(self) -> None:
        found = metadata(text(b"llama.x", b"\xff"), key(b"\xff", UINT32, "I", 1))
        self.assertEqual(len(found), 6)
        self.assertEqual(found["llama.x"], b"\xff")
        self.assertEqual(found["general.architecture"], "llama")
        self.assertEqual(list(found)[1], "general.alignment")
        self.assertEqual(found["tokenizer.ggml.add_bos_token"], True)
        self.assertNotIn("x", found)
        with self.assertRaises(KeyError):
            found["x"]

    def test_first_of_two_values_counts(self) -> None:
        found = metadata(key(b"llama.a", UINT32, "I", 1), key(b"llama.a", UINT32, "I", 2))
        self.assertEqual(found.get_as("a", "uint32"), 1)


class Types(unittest.TestCase):
    VALUES = [
        ("uint8", 0, "B", 255),
        ("int8", 1, "b", -1),
        ("uint16", 2, "H", 65535),
        ("int16", 3, "h", -2),
        ("uint32", 4, "I", 1 << 31),
        ("int32", 5, "i", -3),
        ("float32", 6, "f", 1.5),
        ("bool", 7, "B", True),
        ("uint64", 10, "Q", 1 << 63),
        ("int64", 11, "q", -4),
        ("float64", 12, "d", 0.1),
    ]

    def test_value_has_exactly_one_type(self) -> None:
        for order in "<>":
            keys = [key(b"llama.v", 4, "I", 0, order=order)]
            keys += [key(b"llama." + name.encode(), kind, form, value, order=order) for name, kind, form, value in self.VALUES]
            found = metadata(*keys, order=order)
            for name, _, _, value in self.VALUES:
                self.assertEqual(found.type_of(name), name)
                for asked, *_ in self.VALUES:
                    expected = value if asked == name else None
                    self.assertEqual(found.get_as(name, asked), expected, (order, name, asked))

    def test_arrays_have_their_elements_type(self) -> None:
        keys = [key(f"llama.{n}".encode(), ARRAY, f"IQ2{form}", kind, 2, value, 0) for n, kind, form, value in self.VALUES]
        found = metadata(*keys)
        for name, _, _, value in self.VALUES:
            self.assertEqual(found.type_of(name), f"array<{name}>")
            self.assertEqual(found.get_as(name, f"array<{name}>"), [value, 0])
            self.assertIsNone(found.get_as(name, name))

    def test_bool_is_any_byte_but_zero(self) -> None:
        self.assertIs(metadata(key(b"llama.b", 7, "B", 237)).get_as("b", "bool"), True)

    def test_text_that_is_not_utf_8_counts_as_missing(self) -> None:
        words = b"".join([string("a"), struct.pack("<Q", 1) + b"\xff", string("ü")])
        found = metadata(text(b"llama.t", b"\xff"), key(b"llama.l", ARRAY, "IQ", STRING, 3) + words)
        self.assertEqual(found.get_as("t", "string", "none"), "none")
        self.assertEqual(found.get_as("l", "array<string>"), ["a", "ü"])
        self.assertEqual(found["llama.l"], ["a", b"\xff", "ü"])
        self.assertEqual(len(found["tokenizer.ggml.tokens"]), 100)  # type: ignore[arg-type]

    def test_default_is_the_callers(self) -> None:
        self.assertEqual(metadata().get_as("rope.freq_base", "float32", 10000.0), 10000.0)
        self.assertIsNone(metadata().type_of("rope.freq_base"))


class Accessors(unittest.TestCase):
    def test_missing_keys_have_ollamas_defaults(self) -> None:
        found = metadata()
        self.assertEqual((found.kind, found.file_type, found.chat_template), ("unknown", None, None))
        self.assertEqual((found.block_count, found.context_length, found.embedding_length), (0, 0, 0))
        self.assertEqual((found.head_count, found.head_count_kv), (Range(1, 1), Range(1, 1)))
        self.assertEqual(found.parameter_count, 0)

    def test_keys_are_read(self) -> None:
        found = metadata(
            text(b"general.type", b"model"),
            key(b"general.file_type", UINT32, "I", 15),
            key(b"general.parameter_count", 10, "Q", 7),
            key(b"llama.context_length", UINT32, "I", 8192),
            key(b"llama.embedding_length", 10, "Q", 4096),
            text(b"tokenizer.chat_template", b"{{ x }}"),
            tensors=[tensor("a", "F32", 8, 4), tensor("b", "Q8_0", 64)],
        )
        self.assertEqual((found.kind, found.file_type, found.chat_template), ("model", 15, "{{ x }}"))
        self.assertEqual((found.context_length, found.embedding_length), (8192, 0))
        self.assertEqual(found.parameter_count, 96)

    def test_file_type_0_is_unknown(self) -> None:
        self.assertIsNone(metadata(key(b"general.file_type", UINT32, "I", 0)).file_type)

    def test_heads_are_a_number_or_one_number_per_block(self) -> None:
        for value, expected in [
            ((UINT32, "I", 32), Range(32, 32)),
            ((ARRAY, "IQ3I", UINT32, 3, 8, 0, 16), Range(0, 16)),
            ((ARRAY, "IQ2i", INT32, 2, 4, 2), Range(2, 4)),
            # Ordered as signed numbers, read as unsigned.
            ((ARRAY, "IQ2i", INT32, 2, 4, -1), Range(4294967295, 4)),
            ((ARRAY, "IQ", UINT32, 0), Range(1, 1)),
            ((10, "Q", 32), Range(1, 1)),
            ((INT32, "i", 32), Range(1, 1)),
        ]:
            found = metadata(key(b"llama.attention.head_count", *value))  # type: ignore[arg-type]
            self.assertEqual(found.head_count, expected, value)


    def test_head_sizes_are_the_keys_or_follow_from_the_heads(self) -> None:
        embedding = key(b"llama.embedding_length", UINT32, "I", 4096)
        heads = key(b"llama.attention.head_count", ARRAY, "IQ2I", UINT32, 2, 32, 16)
        found = metadata(embedding, heads, key(b"llama.attention.key_length", UINT32, "I", 192))
        self.assertEqual((found.head_size_max, found.head_size_k, found.head_size_v), (256, 192, 256))
        # A value of another type counts as missing.
        found = metadata(embedding, key(b"llama.attention.value_length", 10, "Q", 64))
        self.assertEqual((found.head_size_max, found.head_size_k, found.head_size_v), (4096, 4096, 4096))
        found = metadata(embedding, key(b"llama.attention.head_count", UINT32, "I", 0))
        self.assertEqual((found.head_size_max, found.head_size_k), (0, 0))


class Layers(unittest.TestCase):
    def test_names_are_split_as_ollama_splits_them(self) -> None:
        table = json.loads((HERE.parent.parent / "tests" / "layer_names.json").read_text())
        self.assertGreater(len(table), 10)
        for name, layer, rest in table:
            self.assertEqual(split_name(name), (layer, rest), name)

    def test_block_numbers_are_read_from_names(self) -> None:
        self.assertEqual((block_number("blk.31.attn_q.weight"), block_number("blk.0.")), (31, 0))
        for name in ["blk.31", "v.blk.3.attn_q", "blk.-1.x", "blk.+1.x", "blk..x", "blk.x.y", "output.weight"]:
            self.assertIsNone(block_number(name), name)
        self.assertIsNone(block_number("blk.99999999999999999999.x"))


class Damage(unittest.TestCase):
    def test_unknown_and_nested_types_are_refused(self) -> None:
        for value in [key(b"x", 13, "B", 0), key(b"x", ARRAY, "IQ", ARRAY, 0), key(b"x", ARRAY, "IQB", 13, 1, 0)]:
            with self.assertRaises(GgufError):
                metadata(value)

    def test_values_beyond_the_end_are_refused(self) -> None:
        whole = gguf([], more_keys=[key(b"x", ARRAY, "IQ", UINT32, 1 << 62)])
        with self.assertRaises(GgufError):
            parse(memoryview(whole))


if __name__ == "__main__":
    unittest.main()
