"""The contiguous GGUF is valid, has the same tensors, and is not copied."""

from __future__ import annotations

import ctypes
import struct
import sys
import tempfile
import unittest
from typing import Any, Dict, List, Tuple

from support import FakeDaemon, FakePeer, TYPES, entry, gguf, layer, temporary_file, tensor
from test_daemon import DENSE, SEPARATE, STACKED, VIDEO, DaemonTest, numpy

import blobd
from blobd import gguf as gguf_format
from blobd.contiguous import ALIGNMENT
from blobd.errors import GgufError

try:
    from gguf import GGUFReader as gguf_reader
except ImportError:
    gguf_reader = None


def independent_reading(data: memoryview) -> Tuple[int, int, Dict[str, Tuple[Tuple[int, ...], int, int]]]:
    """Alignment, start of the data section, and tensors, by the rules that engines follow: the data
    section starts at the next multiple of the alignment, and each tensor at the padded end of the one
    before. Supports only the keys that `support.gguf` writes."""
    place = 0

    def read(form: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from("<" + form, data, place)
        place += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal place
        length = read("Q")
        place += length
        return str(data[place - length : place], "utf-8")

    assert bytes(data[:4]) == b"GGUF"
    place = 4
    assert read("I") == 3
    tensor_count, key_count, alignment = read("Q"), read("Q"), 32
    for _ in range(key_count):
        key, kind = text(), read("I")
        if kind == 8:
            text()
        elif kind == 9:
            element, count = read("I"), read("Q")
            for _ in range(count):
                text() if element == 8 else read("f")
        elif key == "general.alignment":
            alignment = read("I")
        else:
            read("?")
    tensors, expected = {}, 0
    for _ in range(tensor_count):
        name, rank = text(), read("I")
        shape = tuple(read("Q") for _ in range(rank))
        kind, offset = read("I"), read("Q")
        assert offset == expected, f"{name} at {offset}, {expected} expected"
        _, block, block_bytes = next(known for known in TYPES.values() if known[0] == kind)
        size = block_bytes
        for length in shape:
            size *= length
        size //= block
        tensors[name] = (shape, offset, size)
        expected += -(-size // alignment) * alignment
    return alignment, -(-place // alignment) * alignment, tensors


class Contiguous(DaemonTest):
    def check(self, reference: str, written: List[Any]) -> int:
        """Checks every tensor by the format's rules; returns how many bytes were copied."""
        model = self.open(reference)
        with model.contiguous() as whole:
            alignment, start, tensors = independent_reading(whole.buffer)
            self.assertEqual((alignment, start), (ALIGNMENT, whole.header_bytes))
            self.assertEqual(list(tensors), [name for name, *_ in written])
            for name, _, shape, data in written:
                found, offset, size = tensors[name]
                self.assertEqual((found, size), (shape, len(data)))
                self.assertEqual(bytes(whole.buffer[start + offset : start + offset + size]), data, name)
                self.assertEqual((whole.address + start + offset) % ALIGNMENT, 0)
            self.assertEqual(len(whole), len(whole.buffer))
            return whole.copied_bytes

    def test_dense_model_is_all_maps(self) -> None:
        self.assertEqual(self.check("dense", DENSE), 0)

    def test_alignment_is_added_where_the_file_has_none(self) -> None:
        self.assertEqual(self.check("unaligned", DENSE), 0)

    def test_stacked_experts_are_maps(self) -> None:
        self.assertEqual(self.check("stacked", STACKED), 0)

    def test_tensor_of_five_dimensions_keeps_its_shape(self) -> None:
        self.assertEqual(self.check("video", VIDEO), 0)

    def test_experts_between_pages_are_copied_and_counted(self) -> None:
        # Experts of 8192 bytes start at page boundaries; of those of 256 bytes only the first does.
        self.assertEqual(self.check("separate", SEPARATE), 3 * 256)

    def test_pages_are_the_blobs(self) -> None:
        model = self.open("dense")
        with model.contiguous() as whole:
            start = whole.address + whole.header_bytes
            with open("/proc/self/maps") as maps:
                at_start = [line for line in maps if line.startswith(f"{start:x}-")]
            self.assertEqual(len(at_start), 1)
            self.assertIn("r--s", at_start[0])
            self.assertIn("/blobs/", at_start[0])

    def test_nothing_of_it_can_be_written(self) -> None:
        with self.open("separate").contiguous() as whole:
            first, last = whole.address, whole.address + whole.size
            with open("/proc/self/maps") as maps:
                spans = [(line.split("-")[0], line.split(" ")[1]) for line in maps]
            inside = [rights for address, rights in spans if first <= int(address, 16) < last]
            self.assertTrue(inside)
            self.assertTrue(all(rights.startswith("r--") for rights in inside), inside)
            self.assertTrue(whole.buffer.readonly)

    def test_address_can_be_given_to_an_engine(self) -> None:
        with self.open("dense").contiguous() as whole:
            self.assertEqual(ctypes.string_at(whole.address, 4), b"GGUF")

    def test_views_keep_the_memory_after_the_block_and_the_model(self) -> None:
        model = self.client.open("dense")
        with model.contiguous() as whole:
            view = whole.buffer[whole.header_bytes :]
        model.close()
        del model
        self.assertEqual(bytes(view[: len(DENSE[0][3])]), DENSE[0][3])
        with self.assertRaises(blobd.SessionClosedError):
            whole.buffer
        with self.assertRaises(blobd.SessionClosedError):
            whole.address

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_numpy_reads_it(self) -> None:
        with self.open("dense").contiguous() as whole:
            array = numpy.frombuffer(whole.buffer, dtype=numpy.uint8)
            self.assertEqual(array.ctypes.data, whole.address)
            if sys.version_info >= (3, 12):
                self.assertEqual(bytes(memoryview(whole)[:4]), b"GGUF")

    @unittest.skipIf(gguf_reader is None, "gguf is not installed")
    def test_reader_of_others_agrees(self) -> None:
        for reference, written in (("unaligned", DENSE), ("separate", SEPARATE)):
            with self.open(reference).contiguous() as whole, tempfile.NamedTemporaryFile() as file:
                file.write(whole.buffer)
                file.flush()
                reader = gguf_reader(file.name)
                found = {known.name: bytes(known.data) for known in reader.tensors}
                self.assertEqual(found, {name: data for name, _, _, data in written})

    def test_selection_of_tensors_is_no_file(self) -> None:
        with self.assertRaises(blobd.ModelError) as caught:
            self.open("dense", prefix="blk.").contiguous()
        self.assertIn("open the model without a selection", str(caught.exception))

    def test_closed_model_has_none(self) -> None:
        model = self.client.open("dense")
        model.close()
        with self.assertRaises(blobd.SessionClosedError):
            model.contiguous()

    def test_model_without_a_split_file_has_none(self) -> None:
        with self.assertRaises(blobd.ModelError):
            self.open("spoken", component="template").contiguous()
        with self.assertRaises(blobd.ModelError):
            self.open("spoken").contiguous(0)


class LyingTables(unittest.TestCase):
    """A fake daemon whose table does not match its header or its files."""

    def contiguous(self, header: bytes, length: int = 64, **fields: Any) -> blobd.ContiguousGguf:
        def script(peer: FakePeer) -> None:
            peer.head(1, 2, [layer(header={"fd": 0, "size": len(header)})])
            peer.frame(tensors=[entry(fd=1, **fields)])
            peer.frame([temporary_file(header), temporary_file(bytes(length))], fds={"first": 0, "count": 2})
            peer.wait_for_close()

        with FakeDaemon(script) as fake, blobd.Client(fake.socket, timeout=5).open("m") as model:
            return model.contiguous()

    def test_honest_table_works(self) -> None:
        whole = self.contiguous(gguf([tensor("t", "F32", 16)])[:-64])
        self.assertEqual(whole.size, whole.header_bytes + ALIGNMENT)

    def test_file_shorter_than_its_table_is_never_touched(self) -> None:
        with self.assertRaises(blobd.ShortError):
            self.contiguous(gguf([tensor("t", "F32", 16)])[:-64], length=63)

    def test_size_beyond_address_space_is_refused(self) -> None:
        with self.assertRaises(GgufError):
            self.contiguous(gguf([tensor("t", "F32", 16)])[:-64], size=1 << 63)
        with self.assertRaises(blobd.ModelError):
            self.contiguous(gguf([tensor("t", "F32", 16)])[:-64], size=1 << 45)

    def test_shape_other_than_the_headers_is_refused(self) -> None:
        with self.assertRaises(GgufError):
            self.contiguous(gguf([tensor("t", "F32", 4, 4)])[:-64])

    def test_tensor_that_the_header_lacks_is_refused(self) -> None:
        with self.assertRaises(GgufError):
            self.contiguous(gguf([]))

    def test_header_that_is_none_is_refused(self) -> None:
        with self.assertRaises(GgufError):
            self.contiguous(b"GGML" + bytes(100))


class Headers(unittest.TestCase):
    def test_rewriting_keeps_metadata_and_tensors(self) -> None:
        for order in "<>":
            for alignment in (None, 32, 64):
                with self.subTest(order=order, alignment=alignment):
                    before = gguf_format.parse(memoryview(gguf(DENSE, alignment, order)))
                    offsets = [4096 * place for place in range(len(DENSE))]
                    rewritten = before.rewritten(4096, offsets)
                    after = gguf_format.parse(memoryview(rewritten))
                    self.assertEqual((after.alignment, after.order), (4096, order))
                    self.assertEqual(len(rewritten) % 4096, 0)
                    self.assertEqual([info.offset for info in after.tensors], offsets)
                    for old, new in zip(before.tensors, after.tensors):
                        self.assertEqual((old.name, old.shape, old.type_id), (new.name, new.shape, new.type_id))
                    # `support.gguf` writes the alignment second; if it is missing, the client adds it at the end.
                    known = gguf(DENSE, alignment or 4096, order)
                    self.assertIn(before.metadata[-200:], rewritten)
                    self.assertEqual(gguf_format.parse(memoryview(known)).key_count, after.key_count)

    def test_header_cut_off_anywhere_is_an_error(self) -> None:
        whole = gguf(DENSE)
        length = gguf_format.parse(memoryview(whole)).length
        for end in range(length):
            with self.assertRaises(GgufError):
                gguf_format.parse(memoryview(whole)[:end])

    def test_flipped_bytes_never_escape_as_other_errors(self) -> None:
        whole = gguf(DENSE[:2])
        for place in range(gguf_format.parse(memoryview(whole)).length):
            for value in (0, 0x7F, 0xFF):
                broken = bytearray(whole)
                broken[place] = value
                try:
                    header = gguf_format.parse(memoryview(broken))
                    header.rewritten(4096, [0] * len(header.tensors))
                except GgufError:
                    pass

    def test_counts_beyond_the_limits_are_errors(self) -> None:
        for counts in ((1 << 60, 0), (0, 1 << 60)):
            with self.assertRaises(GgufError):
                gguf_format.parse(memoryview(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(1000)))

    def test_version_and_nested_arrays_are_refused(self) -> None:
        with self.assertRaises(GgufError):
            gguf_format.parse(memoryview(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)))
        nested = struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1 << 40)
        with self.assertRaises(GgufError):
            gguf_format.parse(memoryview(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested))


if __name__ == "__main__":
    unittest.main()
