#!/usr/bin/env python3
"""Writes a small GGUF file with random weights: model.py PATH [SEED]."""

import random
import struct
import sys

ALIGNMENT = 32
TENSORS = 24
ROWS, COLUMNS = 64, 64
F32 = 0
STRING, UINT32 = 8, 4


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def write(path, seed):
    weights = random.Random(seed)
    size = ROWS * COLUMNS * 4
    pairs = [
        text("general.architecture") + struct.pack("<I", STRING) + text("llama"),
        text("llama.block_count") + struct.pack("<II", UINT32, TENSORS),
    ]
    header = struct.pack("<4sIQQ", b"GGUF", 3, TENSORS, len(pairs)) + b"".join(pairs)
    for index in range(TENSORS):
        header += text(f"blk.{index}.attn_q.weight")
        header += struct.pack("<IQQIQ", 2, COLUMNS, ROWS, F32, index * size)
    header += bytes(-len(header) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(header)
        for _ in range(TENSORS):
            file.write(weights.randbytes(size))


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
