"""Parts of tensors: the indexes of `safetensors`, which a test compares with the library where it is installed."""

from __future__ import annotations

import tempfile
import unittest
from typing import Any, List, Tuple

from support import bytes_of, safetensors
from test_safe_open import Raw, library, numpy, torch

import blobd
from blobd._elements import NumpyElements, TorchElements

# Shape, index, and the shape of the result, or the error's words.
INDEXES: List[Tuple[List[int], Any, Any]] = [
    ([2, 3, 4], 0, [3, 4]),
    ([2, 3, 4], -1, [3, 4]),
    ([2, 3, 4], True, [3, 4]),
    ([2, 3, 4], slice(None), [2, 3, 4]),
    ([2, 3, 4], (), [2, 3, 4]),
    ([2, 3, 4], ..., [2, 3, 4]),
    ([2, 3, 4], (0, 1, 2), []),
    ([2, 3, 4], (slice(None), 1), [2, 4]),
    ([2, 3, 4], (..., 1), [2, 3]),
    ([2, 3, 4], (0, ..., slice(1, 3)), [3, 2]),
    ([2, 3, 4], (slice(None), ..., slice(None), slice(None)), [2, 3, 4]),
    ([2, 3, 4], slice(None, None, 2), [1, 3, 4]),
    ([2, 3, 4], (slice(None), slice(None), slice(1, None, 3)), [2, 3, 1]),
    ([2, 3, 4], slice(0, 0), [0, 3, 4]),
    ([2, 3, 4], slice(-1, None), [1, 3, 4]),
    ([2, 3, 4], (slice(None), slice(None, -1)), [2, 2, 4]),
    ([2, 3, 4], slice(1, 0), [0, 3, 4]),
    ([0, 3], slice(None), [0, 3]),
    ([], ..., []),
    ([], (), []),
    ([2, 3, 4], 2, "expected -2 to 1, found 2"),
    ([2, 3, 4], -3, "expected -2 to 1, found -3"),
    ([2, 3, 4], slice(0, 10), "bounds: expected -2 to 2, found 10"),
    ([2, 3, 4], slice(-3, None), "bounds: expected -2 to 2, found -3"),
    ([2, 3, 4], slice(None, None, -1), "step: expected 1 or more, found -1"),
    ([2, 3, 4], slice(None, None, 0), "step: expected 1 or more, found 0"),
    ([2, 3, 4], (0, 0, 0, 0), "expected at most 3 dimensions, found 4"),
    ([2, 3, 4], (..., ...), "expected at most one ellipsis, found 2"),
    ([2, 3, 4], None, "expected a number, a slice or an ellipsis, found None"),
    ([2, 3, 4], [0, 1], "expected a number, a slice or an ellipsis, found [0, 1]"),
    ([2, 3, 4], 1.0, "expected a number, a slice or an ellipsis, found 1.0"),
    ([2, 3, 4], slice("a", None), "expected numbers, found 'a'"),
    ([0, 3], 0, "expected 0 to -1, found 0"),
    ([], 0, "expected at most 0 dimensions, found 1"),
]


class Slices(unittest.TestCase):
    def part(self, shape: List[int], elements: Any) -> blobd.TensorSlice:
        size = 4
        for length in shape:
            size *= length
        return blobd.TensorSlice("t", "F32", tuple(shape), memoryview(bytes_of("t", size)), elements)

    def test_indexes_select_parts_or_are_refused(self) -> None:
        for shape, index, expected in INDEXES:
            with self.subTest(shape=shape, index=index):
                if isinstance(expected, str):
                    with self.assertRaises(blobd.SliceError) as caught:
                        self.part(shape, Raw())[index]
                    self.assertIn(expected, str(caught.exception))
                    self.assertIsInstance(caught.exception, IndexError)
                    continue
                places = self.part(shape, Raw())[index]
                self.assertEqual(len(places), len(shape))
                lengths = [len(range(each.start, each.stop, each.step)) for each in places if isinstance(each, slice)]
                self.assertEqual(lengths, expected)

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_parts_are_those_of_numpy(self) -> None:
        for shape, index, expected in INDEXES:
            if not isinstance(expected, str):
                part = self.part(shape, NumpyElements())
                whole, found = part[...], part[index]
                # To NumPy, True is a mask.
                self.assertEqual(found.tobytes(), whole[1 if index is True else index].tobytes())
                self.assertEqual((list(found.shape), found.flags.c_contiguous), (expected, True))

    @unittest.skipIf(numpy is None or library is None, "numpy or safetensors is not installed")
    def test_library_gives_the_same_parts_and_refuses_what_is_refused_here(self) -> None:
        beyond = {(2, 3, 4): [slice(-1, None), (slice(None), slice(None, -1)), slice(1, 0)], (0, 3): [slice(None)]}
        for shape, index, expected in INDEXES:
            with tempfile.NamedTemporaryFile() as file:
                data = self.part(shape, Raw())._data
                file.write(safetensors([("t", "F32", shape, bytes(data))]))
                file.flush()
                theirs = library.safe_open(file.name, "np").get_slice("t")
                with self.subTest(shape=shape, index=index):
                    if isinstance(expected, str) or any(index == each for each in beyond.get(tuple(shape), [])):
                        self.assertRaises((Exception, SystemError), lambda: theirs[index])
                        continue
                    ours = self.part(shape, NumpyElements())[index]
                    self.assertEqual((ours.shape, ours.tobytes()), (theirs[index].shape, theirs[index].tobytes()))

    @unittest.skipIf(torch is None or library is None, "torch or safetensors is not installed")
    def test_indexes_of_pytorch_are_those_of_the_library(self) -> None:
        more: List[Any] = [[0, 1], (slice(None), [2, 0]), None, (..., None), (True, 0), slice(0, 99), slice(-99, 1)]
        more += [torch.tensor([1]), slice(1, 0), (None, -1), 2, -3, slice(None, None, -1), (0,) * 4, "a", [5], 1.0]
        shape = [2, 3, 4]
        with tempfile.NamedTemporaryFile() as file:
            data = self.part(shape, Raw())._data
            file.write(safetensors([("t", "F32", shape, bytes(data))]))
            file.flush()
            theirs, ours = library.safe_open(file.name, "pt").get_slice("t"), self.part(shape, TorchElements("cpu"))
            for index in [*(index for each, index, _ in INDEXES if each == shape), *more]:
                with self.subTest(index=index):
                    try:
                        expected = theirs[index]
                    except Exception:
                        self.assertRaises(blobd.SliceError, lambda: ours[index])
                        continue
                    found = ours[index]
                    self.assertEqual(found.shape, expected.shape)
                    self.assertTrue(torch.equal(found, expected) and found.is_contiguous())


if __name__ == "__main__":
    unittest.main()
