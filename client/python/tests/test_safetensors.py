"""Headers of safetensors files: the table of cases with the verdicts of the library."""

from __future__ import annotations

import re
import struct
import unittest
from typing import Iterator, Tuple

from support import HERE, safetensors

import blobd
from blobd.safetensors import MAX_DIMENSIONS, MAX_TENSORS, parse

CASES = HERE.parents[2] / "store-format" / "src" / "safetensors" / "library_cases.tsv"


def cases() -> Iterator[Tuple[str, str, bytes]]:
    """The verdict of the library, what the case is, and the file; `tests/safetensors_cases.py` has the columns."""
    for line in CASES.read_text("ascii").splitlines():
        if line.startswith("#"):
            continue
        verdict, name, length, spaces, data, header = line.split("\t")
        header_bytes = re.sub(rb"\\x(..)", lambda found: bytes([int(found[1], 16)]), header.encode())
        header_bytes += b" " * int(spaces)
        stated = len(header_bytes) if length == "-" else int(length)
        file = struct.pack("<Q", stated) + header_bytes + bytes(int(data)) if stated >= 0 else b""
        yield verdict, name, file


def header_of(text: str, data: int = 0) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode() + bytes(data)


class Cases(unittest.TestCase):
    def test_headers_are_accepted_exactly_if_the_library_accepts_them(self) -> None:
        count = 0
        for verdict, name, file in cases():
            with self.subTest(name):
                try:
                    parse(memoryview(file))
                    found = "accepted"
                except blobd.SafetensorsError:
                    found = "refused"
                self.assertEqual(found, verdict)
            count += 1
        self.assertEqual(count, 235)

    def test_last_entry_of_a_repeated_name_counts(self) -> None:
        entry = '{"dtype":"%s","shape":[1],"data_offsets":[0,1]}'
        header = parse(memoryview(header_of('{"a":' + entry % "I8" + ',"a":' + entry % "U8" + "}", 1)))
        self.assertEqual([(tensor.name, tensor.dtype) for tensor in header.tensors], [("a", "U8")])

    def test_tensors_are_in_the_order_of_their_data(self) -> None:
        file = safetensors([("b", "U8", [1], b"1"), ("a", "F16", [2], b"2345"), ("e", "U8", [0], b"")], x="y")
        header = parse(memoryview(file))
        self.assertEqual([tensor.name for tensor in header.tensors], ["b", "a", "e"])
        self.assertEqual([tensor.offset - header.data_offset for tensor in header.tensors], [0, 1, 5])
        self.assertEqual((header.metadata, header.has_metadata), ({"x": "y"}, True))

    def test_absent_metadata_and_empty_metadata_differ(self) -> None:
        for text, expected in [("{}", False), ('{"__metadata__":null}', False), ('{"__metadata__":{}}', True)]:
            header = parse(memoryview(header_of(text)))
            self.assertEqual((header.metadata, header.has_metadata), ({}, expected))

    def test_size_of_the_file_may_be_given(self) -> None:
        file = safetensors([("a", "U8", [3], b"123")])
        head = memoryview(file)[:-3]
        self.assertEqual(parse(head, len(file)).tensors[0].size, 3)
        with self.assertRaises(blobd.SafetensorsError) as caught:
            parse(head, len(file) + 1)
        self.assertIn(f"the tensors end at byte {len(file)}", str(caught.exception))

    def test_limits_of_cost_are_named(self) -> None:
        entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        many = ",".join(f'"{number}":{entry}' for number in range(MAX_TENSORS + 1))
        ones = ",".join("1" for _ in range(MAX_DIMENSIONS + 1))
        long = "a" * (65 << 10)
        for text, words in [
            ("{" + many + "}", f"more than {MAX_TENSORS} tensors"),
            ('{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}}' % ones, "too many dimensions"),
            ('{"%s":%s}' % (long, entry), "too long"),
            ('{"__metadata__":{%s}}' % ",".join(f'"{number}":""' for number in range(65_537)), "entries of metadata"),
            ('{"__metadata__":{"a":"%s"}}' % ("x" * (17 << 20)), "bytes of names and metadata"),
        ]:
            with self.subTest(words), self.assertRaises(blobd.SafetensorsError) as caught:
                parse(memoryview(header_of(text, 1)))
            self.assertIn(words, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
