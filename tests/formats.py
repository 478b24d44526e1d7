#!/usr/bin/env python3
"""Decodes every number format; written from docs/FORMATS.md alone: `formats.py DOCS FOLDER`

FOLDER has a file `TYPE.blocks` for each ggml type, files `TYPE.elements` for the small floats of safetensors, or files
`NAME.safetensors` with a quantised tensor `w` of a model with one layer per tensor. The numbers of each file are written
to a file with the extension `.numbers`, as little-endian binary32. The tables are read from DOCS. Needs only Python.
A test compares the numbers with those of `blobd tensor`: where they differ, or where this program needs a fact that the
document does not state, the document is wrong.
"""

import json
import math
import pathlib
import re
import struct
import sys

# Read from the document: two tables of 16 values,
K4 = []
E2M1 = []
# the bits of exponent and mantissa and the bias of each small float,
FLOATS = {}
# and the entries of each codebook.
GRIDS = {}


def main() -> None:
    docs, folder = map(pathlib.Path, sys.argv[1:])
    document = (docs / "FORMATS.md").read_text(encoding="utf-8")
    for name, table in (("k4", K4), ("e2m1", E2M1)):
        table += map(int, re.search(rf"^{name} +([-0-9 ]+)$", document, re.MULTILINE)[1].split())
    for path, *_, values in re.findall(r"^\| \[\w+.txt\]\((.*)\) \|(.*)\|(.*)\|(.*)\|(.*)\|$", document, re.MULTILINE):
        values = [int(value) for value in values.split(",")]
        lines = (docs / path).read_text().splitlines()
        GRIDS[pathlib.Path(path).stem] = [[values[int(digit)] for digit in line] for line in lines]
    for name, *numbers in re.findall(r"^\| `(F\w+)` \| (\d) \| (\d) \| (\d+) \|", document, re.MULTILINE):
        FLOATS[name] = tuple(map(int, numbers))
    for source in sorted(folder.glob("*.elements")):
        data = source.read_bytes()
        write(source, [small_float(source.stem, code) for code in codes(source.stem, data)])
    for source in sorted(folder.glob("*.blocks")):
        size, decode = TYPES[source.stem]
        data = source.read_bytes()
        write(source, [number for at in range(0, len(data), size) for number in decode(data[at : at + size])])
    for source in sorted(folder.glob("*.safetensors")):
        write(source, layer(source.read_bytes()))


def write(source: pathlib.Path, numbers: list[float]) -> None:
    source.with_suffix(".numbers").write_bytes(struct.pack(f"<{len(numbers)}f", *numbers))


def f32(number: float) -> float:
    """The nearest binary32."""
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def times(a: float, b: float) -> float:
    return f32(a * b)


def plus(a: float, b: float) -> float:
    return f32(a + b)


def bits(x: int, at: int, count: int) -> int:
    return (x >> at) & ((1 << count) - 1)


def low(x: int) -> int:
    return bits(x, 0, 4)


def high(x: int) -> int:
    return bits(x, 4, 4)


def halves(qs: bytes) -> list[int]:
    """The low nibbles, then the high nibbles."""
    return [low(byte) for byte in qs] + [high(byte) for byte in qs]


def nibbles(data: bytes) -> list[int]:
    """The low and the high nibble of each byte."""
    return [nibble for byte in data for nibble in (low(byte), high(byte))]


def f16(x: int) -> float:
    e, m = bits(x, 10, 5), bits(x, 0, 10)
    if e == 0:
        value = m * 2.0**-24
    elif e == 31:
        value = math.inf if m == 0 else math.nan
    else:
        value = (1 + m / 1024) * 2.0 ** (e - 15)
    return -value if bits(x, 15, 1) else value


def f16_at(block: bytes, at: int) -> float:
    return f16(u16_at(block, at))


def u16_at(block: bytes, at: int) -> int:
    return int.from_bytes(block[at : at + 2], "little")


def u32_at(block: bytes, at: int) -> int:
    return int.from_bytes(block[at : at + 4], "little")


def i8s(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(data)}b", data)


def ue4m3(x: int) -> float:
    e, m = bits(x, 3, 4), bits(x, 0, 3)
    if x == 0x7F:
        return 0.0
    return m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)


def half_e8m0(e: int) -> float:
    return 2.0 ** (e - 128)


def q4_0(block):
    d = f16_at(block, 0)
    return [times(d, q - 8) for q in halves(block[2:18])]


def q4_1(block):
    d, m = f16_at(block, 0), f16_at(block, 2)
    return [plus(times(d, q), m) for q in halves(block[4:20])]


def five_bits(qh: int, qs: bytes) -> list[int]:
    return [q | bits(qh, i, 1) << 4 for i, q in enumerate(halves(qs))]


def q5_0(block):
    d = f16_at(block, 0)
    return [times(d, q - 16) for q in five_bits(u32_at(block, 2), block[6:22])]


def q5_1(block):
    d, m = f16_at(block, 0), f16_at(block, 2)
    return [plus(times(d, q), m) for q in five_bits(u32_at(block, 4), block[8:24])]


def q8_0(block):
    d = f16_at(block, 0)
    return [times(d, q) for q in i8s(block[2:34])]


def q8_1(block):
    d = f16_at(block, 0)
    return [times(d, q) for q in i8s(block[4:36])]


def q8_k(block):
    (d,) = struct.unpack_from("<f", block)
    return [times(d, q) for q in i8s(block[4:260])]


def two_bits(qs: bytes) -> list[int]:
    return [bits(qs[32 * (i // 128) + i % 32], 2 * (i // 32 % 4), 2) for i in range(4 * len(qs))]


def q2_k(block):
    scales, d, dmin = block[0:16], f16_at(block, 80), f16_at(block, 82)
    return [
        plus(times(times(d, low(scales[i // 16])), q), -times(dmin, high(scales[i // 16])))
        for i, q in enumerate(two_bits(block[16:80]))
    ]


def q3_k(block):
    hmask, scales, d = block[0:32], block[96:108], f16_at(block, 108)
    q = [q | bits(hmask[i % 32], i // 32, 1) << 2 for i, q in enumerate(two_bits(block[32:96]))]
    s = [low4 | bits(scales[8 + j % 4], 2 * (j // 4), 2) << 4 for j, low4 in enumerate(halves(scales[0:8]))]
    return [times(times(d, s[i // 16] - 32), q[i] - 4) for i in range(256)]


def scales_and_minimums(scales: bytes) -> tuple[list[int], list[int]]:
    s, m = [0] * 8, [0] * 8
    for j in range(4):
        s[j] = bits(scales[j], 0, 6)
        m[j] = bits(scales[4 + j], 0, 6)
        s[j + 4] = low(scales[8 + j]) | bits(scales[j], 6, 2) << 4
        m[j + 4] = high(scales[8 + j]) | bits(scales[4 + j], 6, 2) << 4
    return s, m


def four_bits_of_k(qs: bytes) -> list[int]:
    return [q for r in range(4) for q in halves(qs[32 * r : 32 * r + 32])]


def with_minimums(block: bytes, q: list[int]) -> list[float]:
    d, dmin = f16_at(block, 0), f16_at(block, 2)
    s, m = scales_and_minimums(block[4:16])
    return [plus(times(times(d, s[i // 32]), q[i]), -times(dmin, m[i // 32])) for i in range(256)]


def q4_k(block):
    return with_minimums(block, four_bits_of_k(block[16:144]))


def q5_k(block):
    qh = block[16:48]
    low4 = four_bits_of_k(block[48:176])
    return with_minimums(block, [low4[i] | bits(qh[i % 32], i // 32, 1) << 4 for i in range(256)])


def q6_k(block):
    ql, scales, d = block[0:128], i8s(block[192:208]), f16_at(block, 208)
    low4, upper = halves(ql[0:64]) + halves(ql[64:128]), two_bits(block[128:192])
    return [times(times(d, scales[i // 16]), (low4[i] | upper[i] << 4) - 32) for i in range(256)]


def with_even_parity(seven_signs: int) -> int:
    return seven_signs if bin(seven_signs).count("1") % 2 == 0 else seven_signs | 128


def signed(scale: float, entry: list[int], signs: int) -> list[float]:
    values = [times(scale, number) for number in entry]
    return [-value if bits(signs, j, 1) else value for j, value in enumerate(values)]


def iq2_xxs(block):
    d, y = f16_at(block, 0), []
    for p in range(8):
        at = 2 + 8 * p
        signs = u32_at(block, at + 4)
        scale = times(times(d, 0.5 + bits(signs, 28, 4)), 0.25)
        for n in range(4):
            y += signed(scale, GRIDS["iq2_xxs"][block[at + n]], with_even_parity(bits(signs, 7 * n, 7)))
    return y


def iq2_xs(block):
    d, s, y = f16_at(block, 0), nibbles(block[66:74]), []
    for g in range(32):
        q = u16_at(block, 2 + 2 * g)
        scale = times(times(d, 0.5 + s[g // 2]), 0.25)
        y += signed(scale, GRIDS["iq2_xs"][bits(q, 0, 9)], with_even_parity(bits(q, 9, 7)))
    return y


def iq2_s(block):
    d, qs, signs, qh, s = f16_at(block, 0), block[2:34], block[34:66], block[66:74], nibbles(block[74:82])
    y = []
    for g in range(32):
        p, n = divmod(g, 4)
        index = qs[g] | bits(qh[p], 2 * n, 2) << 8
        scale = times(times(d, 0.5 + s[2 * p + n // 2]), 0.25)
        y += signed(scale, GRIDS["iq2_s"][index], signs[g])
    return y


def iq3_xxs(block):
    d, qs, y = f16_at(block, 0), block[2:66], []
    for p in range(8):
        signs = u32_at(block, 66 + 4 * p)
        scale = times(times(d, 0.5 + bits(signs, 28, 4)), 0.5)
        for n in range(4):
            entry = [number for k in (0, 1) for number in GRIDS["iq3_xxs"][qs[8 * p + 2 * n + k]]]
            y += signed(scale, entry, with_even_parity(bits(signs, 7 * n, 7)))
    return y


def iq3_s(block):
    d, qs, qh, signs, s = f16_at(block, 0), block[2:66], block[66:74], block[74:106], nibbles(block[106:110])
    y = []
    for p in range(8):
        index = [qs[8 * p + t] | bits(qh[p], t, 1) << 8 for t in range(8)]
        scale = times(d, 1 + 2 * s[p])
        for n in range(4):
            entry = GRIDS["iq3_s"][index[2 * n]] + GRIDS["iq3_s"][index[2 * n + 1]]
            y += signed(scale, entry, signs[4 * p + n])
    return y


def shifted(scale: float, index: int, negative: int) -> list[float]:
    return [times(scale, number + (-0.125 if negative else 0.125)) for number in GRIDS["iq1_s"][index]]


def iq1_s(block):
    d, y = f16_at(block, 0), []
    for p in range(8):
        qh = u16_at(block, 34 + 2 * p)
        scale = times(d, 2 * bits(qh, 12, 3) + 1)
        for n in range(4):
            y += shifted(scale, block[2 + 4 * p + n] | bits(qh, 3 * n, 3) << 8, bits(qh, 15, 1))
    return y


def iq1_m(block):
    scales, y = [u16_at(block, 48 + 2 * w) for w in range(4)], []
    d = f16(scales[0] >> 12 | (scales[1] >> 12) << 4 | (scales[2] >> 12) << 8 | (scales[3] >> 12) << 12)
    for t in range(16):
        qh = block[32 + t]
        scale = times(d, 2 * bits(scales[t // 4], 3 * (t % 4), 3) + 1)
        for n in (0, 1):
            y += shifted(scale, block[2 * t + n] | bits(qh, 4 * n, 3) << 8, bits(qh, 4 * n + 3, 1))
    return y


def iq4_nl(block):
    d = f16_at(block, 0)
    return [times(d, K4[q]) for q in halves(block[2:18])]


def iq4_xs(block):
    d, scales_h, low4, y = f16_at(block, 0), u16_at(block, 2), nibbles(block[4:8]), []
    for p in range(8):
        scale = times(d, (low4[p] | bits(scales_h, 2 * p, 2) << 4) - 32)
        y += [times(scale, K4[q]) for q in halves(block[8 + 16 * p : 24 + 16 * p])]
    return y


def tq1_0(block):
    def digit(x: int, n: int) -> int:
        return (x * 3**n % 256 * 3) >> 8

    d = f16_at(block, 52)
    digits = [digit(x, n) for n in range(5) for x in block[0:32]]
    digits += [digit(x, n) for n in range(5) for x in block[32:48]]
    digits += [digit(x, n) for n in range(4) for x in block[48:52]]
    return [times(d, t - 1) for t in digits]


def tq2_0(block):
    d = f16_at(block, 64)
    return [times(d, q - 1) for q in two_bits(block[0:64])]


def mxfp4(block):
    return [times(half_e8m0(block[0]), E2M1[q]) for q in halves(block[1:17])]


def mxfp4_ollama(block):
    return [times(half_e8m0(block[0]), E2M1[q]) for q in nibbles(block[1:17])]


def nvfp4(block):
    y = []
    for p in range(4):
        scale = times(ue4m3(block[p]), 0.5)
        y += [times(scale, E2M1[q]) for q in halves(block[4 + 8 * p : 12 + 8 * p])]
    return y


def q1_0(block):
    d = f16_at(block, 0)
    return [d if bits(block[2 + i // 8], i % 8, 1) else -d for i in range(128)]


def q2_0(block):
    d = f16_at(block, 0)
    return [times(d, bits(block[2 + i // 4], 2 * (i % 4), 2) - 1) for i in range(64)]


def bf16(block):
    return struct.unpack("<f", b"\0\0" + block)


def e4m3(x: int) -> float:
    e, m = bits(x, 3, 4), bits(x, 0, 3)
    if e == 15 and m == 7:
        return math.nan
    value = m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    return -value if bits(x, 7, 1) else value


def e8m0(e: int) -> float:
    return math.nan if e == 255 else 2.0 ** (e - 127)


def e2m1(q: int) -> float:
    value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[bits(q, 0, 3)]
    return -value if bits(q, 3, 1) else value


def codes(name: str, data: bytes) -> list[int]:
    """The elements of 4, 6 or 8 bits."""
    if name == "F4":
        return nibbles(data)
    if name.startswith("F6"):
        threes = [int.from_bytes(data[at : at + 3], "little") for at in range(0, len(data), 3)]
        return [bits(three, at, 6) for three in threes for at in (0, 6, 12, 18)]
    return list(data)


def small_float(name: str, code: int) -> float:
    if name == "F8_E8M0":
        return e8m0(code)
    width_e, width_m, bias = FLOATS[name]
    m, e, s = bits(code, 0, width_m), bits(code, width_m, width_e), code >> (width_m + width_e)
    if name.endswith("FNUZ") and code == 0x80 or name == "F8_E4M3" and code & 0x7F == 0x7F:
        return math.nan
    if name == "F8_E5M2" and e == 31:
        return math.nan if m else (-math.inf if s else math.inf)
    value = 2.0 ** (e - bias) * (1 + m / 2**width_m) if e else 2.0 ** (1 - bias) * (m / 2**width_m)
    return -value if s else value


# Bits of a code, default size of a group, decoder of a code, decoder of a scale of type U8.
LAYER_TYPES = {
    "int4": (4, 64, float, None),
    "int8": (8, 64, float, None),
    "nvfp4": (4, 16, e2m1, e4m3),
    "mxfp4": (4, 32, e2m1, e8m0),
    "mxfp8": (8, 32, e4m3, e8m0),
}


def layer(file: bytes) -> list[float]:
    (length,) = struct.unpack_from("<Q", file)
    header = json.loads(file[8 : 8 + length])
    metadata = header.pop("__metadata__")
    width, group, value, byte_scale = LAYER_TYPES[metadata["quant_type"]]
    group = int(metadata.get("group_size", group))

    def numbers(name: str):
        if name not in header:
            return None
        start, end = header[name]["data_offsets"]
        data = file[8 + length + start : 8 + length + end]
        dtype = header[name]["dtype"]
        if dtype == "U8":
            return [byte_scale(x) for x in data]
        if dtype == "F16":
            return [f16_at(data, at) for at in range(0, len(data), 2)]
        if dtype == "BF16":
            return [bf16(data[at : at + 2])[0] for at in range(0, len(data), 2)]
        if dtype == "F32":
            return list(struct.unpack(f"<{len(data) // 4}f", data))
        return [f32(number) for number in struct.unpack(f"<{len(data) // 8}d", data)]

    start, end = header["w"]["data_offsets"]
    data = file[8 + length + start : 8 + length + end]
    codes = nibbles(data) if width == 4 else list(data)
    scale, bias = numbers("w.scale"), numbers("w.bias")
    (global_scale,) = numbers("w.global_scale") or [1.0]
    y = [times(value(q), times(scale[i // group], global_scale)) for i, q in enumerate(codes)]
    return y if bias is None else [plus(w, bias[i // group]) for i, w in enumerate(y)]


# Bytes of a block, and its decoder.
TYPES = {
    "BF16": (2, bf16),
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "MXFP4_OLLAMA": (17, mxfp4_ollama),
    "Q5_0": (22, q5_0),
    "Q5_1": (24, q5_1),
    "Q8_0": (34, q8_0),
    "Q8_1": (36, q8_1),
    "Q2_K": (84, q2_k),
    "Q3_K": (110, q3_k),
    "Q4_K": (144, q4_k),
    "Q5_K": (176, q5_k),
    "Q6_K": (210, q6_k),
    "Q8_K": (292, q8_k),
    "IQ2_XXS": (66, iq2_xxs),
    "IQ2_XS": (74, iq2_xs),
    "IQ3_XXS": (98, iq3_xxs),
    "IQ1_S": (50, iq1_s),
    "IQ4_NL": (18, iq4_nl),
    "IQ3_S": (110, iq3_s),
    "IQ2_S": (82, iq2_s),
    "IQ4_XS": (136, iq4_xs),
    "IQ1_M": (56, iq1_m),
    "TQ1_0": (54, tq1_0),
    "TQ2_0": (66, tq2_0),
    "MXFP4": (17, mxfp4),
    "NVFP4": (36, nvfp4),
    "Q1_0": (18, q1_0),
    "Q2_0": (18, q2_0),
}


if __name__ == "__main__":
    main()
