#!/usr/bin/env python3
"""Compares dequantisation with PyPI's `gguf`: `just quants`

For each type that `gguf` converts: 100,000 random blocks, blocks whose bytes are all equal,
and random blocks with a special number, such as an infinity, at each position. All results
must be equal bit for bit; NaN equals NaN. The types that `gguf` does not convert are compared
with their formula, computed here with numpy. Prints the speed, and its ratio to the speed of
`gguf` (or of numpy).

Needs `pip install gguf`. Exits with 1 at the first difference, and if Q4_K, Q6_K or
Q8_0 are less than 5 times as fast as `gguf`.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import gguf
import numpy as np

BLOCKS = 100_000
MIN_RATIO = 5.0
TIMED = ("Q4_K", "Q6_K", "Q8_0")

# Elements and bytes of a block of the types that `gguf` does not convert, or for which it assumes a wrong block size.
OTHERS = {
    "MXFP4_OLLAMA": (32, 17),
    "Q8_1": (32, 36),
    "Q8_K": (256, 292),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "F64": (1, 8),
}

CONVERTED = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S "
    "IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 NVFP4"
).split()


def main() -> None:
    (program,) = sys.argv[1:]
    random = np.random.default_rng(20231121)
    slow = []
    for name in [*CONVERTED, *OTHERS]:
        elements, size = sizes(name)
        blocks = np.concatenate([random.integers(0, 256, (BLOCKS, size), np.uint8), adversarial(size, random)])
        found, seconds = convert(program, name, blocks)
        compare(name, elements, found, expected_numbers(name, blocks).ravel())
        rate = len(found) / seconds
        ratio = rate / reference_rate(name, blocks[:BLOCKS], elements)
        print(f"{name:12} {len(blocks)} blocks equal, {rate / 1e6:5.0f} million numbers/s, {ratio:5.1f} times gguf")
        if name in TIMED and ratio < MIN_RATIO:
            slow.append(name)
    if slow:
        sys.exit(f"less than {MIN_RATIO} times as fast as gguf: {', '.join(slow)}")


def sizes(name: str) -> tuple[int, int]:
    return OTHERS.get(name) or gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def adversarial(size: int, random: np.random.Generator) -> np.ndarray:
    """Blocks of equal bytes, and random blocks with a special number at each position."""
    equal = np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, axis=1)
    halves = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFDFF]
    floats = np.array([0, -0.0, 1e-45, -1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
    special = [np.array([half], np.uint16).tobytes() for half in halves]
    special += [value.tobytes() for value in floats] + [value.tobytes() for value in floats.astype(np.float64)]
    blocks = [equal]
    for number in special:
        positions = range(0, size - len(number) + 1)
        some = random.integers(0, 256, (len(positions), size), np.uint8)
        for row, at in enumerate(positions):
            some[row, at : at + len(number)] = np.frombuffer(number, np.uint8)
        blocks.append(some)
    return np.concatenate(blocks)


def expected_numbers(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if name in OTHERS:
            return FORMULAS[name](blocks)
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])


def reference_rate(name: str, blocks: np.ndarray, elements: int) -> float:
    """How many numbers of a tensor with rows of 4096 `gguf`, or numpy, converts in a second; the best of three runs."""
    row = 4096 // elements
    tensor = blocks[: len(blocks) // row * row].reshape(-1, row * blocks.shape[1])
    shortest = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        expected_numbers(name, tensor if name not in OTHERS else blocks)
        shortest = min(shortest, time.perf_counter() - start)
    return (len(blocks) if name in OTHERS else tensor.size // blocks.shape[1]) * elements / shortest


def half(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, :2].copy().view(np.float16).astype(np.float32)


def bits(bytes_: np.ndarray, width: int) -> np.ndarray:
    """Splits each byte into numbers of `width` bits, the lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return ((bytes_[:, :, None] >> shifts) & ((1 << width) - 1)).reshape(len(bytes_), -1).astype(np.float32)


def mxfp4_ollama(blocks: np.ndarray) -> np.ndarray:
    doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return scale * doubled[bits(blocks[:, 1:], 4).astype(int)]


FORMULAS = {
    "MXFP4_OLLAMA": mxfp4_ollama,
    "Q8_1": lambda blocks: half(blocks) * blocks[:, 4:].view(np.int8).astype(np.float32),
    "Q8_K": lambda blocks: blocks[:, :4].copy().view(np.float32)
    * blocks[:, 4:260].view(np.int8).astype(np.float32),
    "Q1_0": lambda blocks: np.where(bits(blocks[:, 2:], 1) == 0, -half(blocks), half(blocks)),
    "Q2_0": lambda blocks: half(blocks) * (bits(blocks[:, 2:], 2) - 1),
    "I8": lambda blocks: blocks.view(np.int8).astype(np.float32),
    "I16": lambda blocks: blocks.view(np.int16).astype(np.float32),
    "I32": lambda blocks: blocks.view(np.int32).astype(np.float32),
    "I64": lambda blocks: blocks.view(np.int64).astype(np.float32),
    "F64": lambda blocks: blocks.view(np.float64).astype(np.float32),
}


def convert(program: str, name: str, blocks: np.ndarray) -> tuple[np.ndarray, float]:
    with tempfile.TemporaryDirectory() as directory:
        source, target = pathlib.Path(directory, "blocks"), pathlib.Path(directory, "numbers")
        source.write_bytes(blocks.tobytes())
        seconds = subprocess.check_output([program, name, str(source), str(target)])
        return np.frombuffer(target.read_bytes(), np.float32), float(seconds)


def compare(name: str, elements: int, found: np.ndarray, expected: np.ndarray) -> None:
    if len(found) != len(expected):
        sys.exit(f"{name}: expected {len(expected)} numbers, found {len(found)}")
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    if not same.all():
        at = int(np.argmin(same))
        where = f"block {at // elements}, element {at % elements}"
        sys.exit(f"{name}: {where}: expected {expected[at]!r}, found {found[at]!r}")


if __name__ == "__main__":
    main()
