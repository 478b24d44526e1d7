#!/usr/bin/env python3
"""Compares `blobd tensor` with PyPI's `gguf` and numpy: `just tensors [FILE.gguf…]`

Generates a file with a tensor of each type that `gguf` converts; more files may be given.
For every tensor, checks that `--npy` loads in numpy and has the values that `gguf` decodes,
bit for bit (NaN equals NaN), that the statistics agree with numpy's in float64 within 1e-12,
that the histogram equals numpy's, and that `--dump` has the bytes of the file.

Needs `pip install gguf`. Exits with 1 at the first difference.
"""

import io
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np

from quants import CONVERTED

TOLERANCE = 1e-12


def main() -> None:
    blobd, *files = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        generated = pathlib.Path(directory, "generated.gguf")
        write_all_types(generated)
        for number, file in enumerate([generated, *map(pathlib.Path, files)]):
            compare_file(Store(blobd, pathlib.Path(directory, f"store-{number}")), file)


class Store:
    def __init__(self, blobd: str, root: pathlib.Path) -> None:
        self.blobd, self.root = blobd, root

    def run(self, *arguments: str) -> bytes:
        return subprocess.check_output([self.blobd, "--root", str(self.root), *arguments])


def write_all_types(path: pathlib.Path) -> None:
    """Writes tensors of small random numbers, and tensors of random bytes, whose scales have any value."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    for name in CONVERTED:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        rows, blocks = 5, 512 // elements
        random_bytes = random.integers(0, 256, (rows, blocks * size), np.uint8)
        writer.add_tensor(f"{name}.bytes", random_bytes, raw_shape=random_bytes.shape, raw_dtype=kind)
        try:
            numbers = gguf.quantize(random.normal(0.01, 0.05, (rows, 512)).astype(np.float32), kind)
        except NotImplementedError:
            continue
        raw = np.ascontiguousarray(numbers).view(np.uint8).reshape(rows, -1)
        writer.add_tensor(f"{name}.numbers", raw, raw_shape=raw.shape, raw_dtype=kind)
    for dtype in (np.int8, np.int16, np.int32, np.int64, np.float64):
        writer.add_tensor(np.dtype(dtype).name, random.normal(0, 100, (3, 7)).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare_file(store: Store, path: pathlib.Path) -> None:
    store.run("import", str(path), "--name", "m")
    tensors = gguf.GGUFReader(path).tensors
    for tensor in tensors:
        compare_tensor(store, tensor)
    print(f"{path.name}: values and statistics of {len(tensors)} tensors agree")


def compare_tensor(store: Store, tensor: gguf.ReaderTensor) -> None:
    name = tensor.name
    expected = numbers_of(tensor)
    found = np.load(io.BytesIO(store.run("tensor", "m", name, "--npy")))
    require(found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}")
    require(found.dtype == expected.dtype, f"{name}: type {found.dtype}, expected {expected.dtype}")
    same = (found == expected) & (np.signbit(found) == np.signbit(expected))
    require(bool((same | (np.isnan(found) & np.isnan(expected))).all()), f"{name}: values differ")
    require(store.run("tensor", "m", name, "--dump") == tensor.data.tobytes(), f"{name}: bytes differ")
    with np.errstate(invalid="ignore"):
        wide = expected.astype(np.float64)
    compare_statistics(name, json.loads(store.run("tensor", "m", name, "--json")), wide)


def numbers_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    plain = ("F16", "F32", "F64", "I8", "I16", "I32", "I64")
    if tensor.tensor_type.name in plain:
        return tensor.data
    shape = [int(length) for length in reversed(tensor.shape)]
    with np.errstate(all="ignore"):
        return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)


def compare_statistics(name: str, found: dict, numbers: np.ndarray) -> None:
    finite = numbers[np.isfinite(numbers)]
    require(found["elements"] == numbers.size, f"{name}: {found['elements']} elements")
    require(found["nan_count"] == int(np.isnan(numbers).sum()), f"{name}: {found['nan_count']} NaN")
    require(found["inf_count"] == int(np.isinf(numbers).sum()), f"{name}: {found['inf_count']} infinite")
    if finite.size == 0:
        require(found["mean"] is None, f"{name}: a mean without numbers")
        return
    # A mean near zero is a sum of large numbers that cancel out: the deviation is its scale.
    scale = max(abs(float(finite.mean())), float(finite.std()))
    for key in ("min", "max", "mean", "std"):
        expected = float(getattr(finite, key)())
        error = abs(found[key] - expected)
        limit = TOLERANCE * (scale if key == "mean" else abs(expected))
        require(error <= limit, f"{name}: {key} {found[key]!r}, expected {expected!r}")
    counts, edges = np.histogram(finite, len(found["histogram"]["counts"]))
    require(found["histogram"]["counts"] == counts.tolist(), f"{name}: histogram {found['histogram']}")
    close = np.allclose(found["histogram"]["edges"], edges, rtol=TOLERANCE, atol=TOLERANCE * scale)
    require(close, f"{name}: edges {found['histogram']['edges']}")


def require(holds: bool, error: str) -> None:
    if not holds:
        sys.exit(error)


if __name__ == "__main__":
    main()
