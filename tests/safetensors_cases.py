#!/usr/bin/env python3
"""Writes a table of safetensors headers with the verdicts of the library: `safetensors_cases.py > library_cases.tsv`

Needs PyPI's `safetensors` of the version in the table's first line and `numpy`. A unit test of `store-format` reads the
table `store-format/src/safetensors/library_cases.tsv` and compares the verdicts with its own, so it needs no Python. Columns:

- `accepted` or `refused`, from memory and from a file alike
- what the case is
- the length in the first eight bytes, or `-` for that of the header
- the number of spaces after the header
- the number of bytes of data
- the header: printable ASCII as it is, all other bytes and the backslash as `\\xNN`
"""

import itertools
import json
import pathlib
import struct
import sys
import tempfile

import safetensors

TYPES = (
    "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 C64 "
    "F64 I64 U64"
).split()
OTHER_TYPES = "I4 U4 C128 F8 FP8 F8_E4M3FN float32 f32 bf16 F128 Q4_0".split() + ["", " F32"]
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BF16": 16}
ONE = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def bits(name):
    digits = "".join(itertools.takewhile(str.isdigit, name[1:]))
    return BITS.get(name) or int(digits)


def tensor(dtype, shape, begin, end, more=""):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]{more}}}'


def u8(begin, end):
    return tensor("U8", [end - begin], begin, end)


def cases():
    """Yields name, header and bytes of data, optionally followed by the length and the number of spaces."""
    yield "no tensors", "{}", 0
    yield "no tensors, but data", "{}", 1
    for spaces in (" ", "\n", "\t", "\r", " \n\t\r ", " " * 600):
        yield f"{spaces[:6]!r} before", spaces + "{}", 0
        yield f"{spaces[:6]!r} after", "{}" + spaces, 0
    for other in ("\f", "\0", "\ufeff", "\u00a0", "x"):
        yield f"{other!r} before", other + "{}", 0
        yield f"{other!r} after", "{}" + other, 0
    yield "empty header", "", 0
    yield "no file", "", 0, -1
    yield "longest header", "{}", 0, None, 100_000_000 - 2
    yield "header too long", "{}", 0, 100_000_001
    yield "length beyond the file", "{}", 0, 3
    yield "length of all bits", "{}", 0, 2**64 - 1
    yield "length before the end", "{}", 1, 1
    for top in ("[]", "null", "1", '"a"', "[{}]", "{} {}", "{", '{"a"}', "{,}", "{'a':1}"):
        yield f"header is {top}", top, 0
    yield "not UTF-8", b'{"\xff":' + ONE.encode() + b"}", 1
    yield "UTF-8 in a name", '{"größe":' + ONE + "}", 1
    yield "surrogate alone", '{"\\ud800":' + ONE + "}", 1
    yield "surrogate pair", '{"\\ud83d\\ude00":' + ONE + "}", 1
    for name in ("", "/", "../../etc/passwd", "\\u0000", "\\n\\u001b[2J", "a" * 300, "__METADATA__"):
        yield f"name {name[:20]!r}", f'{{"{name}":{ONE}}}', 1
    yield "control character in a name", '{"a\nb":' + ONE + "}", 1
    # Metadata.
    for value in ("null", "{}", '{"a":"b"}', '{"":""}', '{"a":"b","a":"c"}', '{"a":"\\u0000"}'):
        yield f"metadata {value}", f'{{"__metadata__":{value},"a":{ONE}}}', 1
    for value in ("[]", '"a"', "1", "true", '{"a":1}', '{"a":null}', '{"a":["b"]}', '{"a":{}}', '["a"]', ONE):
        yield f"metadata {value}", f'{{"__metadata__":{value},"a":{ONE}}}', 1
    yield "metadata last", f'{{"a":{ONE},"__metadata__":{{"format":"pt"}}}}', 1
    yield "metadata twice", '{"__metadata__":{},"__metadata__":{}}', 0
    yield "metadata null and again", '{"__metadata__":null,"__metadata__":{}}', 0
    # Types.
    for dtype in TYPES:
        size = bits(dtype)
        yield f"{dtype} of 8", f'{{"a":{tensor(dtype, [2, 4], 0, size)}}}', size
        if size % 8:
            yield f"{dtype} of 4", f'{{"a":{tensor(dtype, [4], 0, size // 2)}}}', size // 2
            yield f"{dtype} of 2", f'{{"a":{tensor(dtype, [2], 0, size // 4)}}}', size // 4
            yield f"{dtype} of 3", f'{{"a":{tensor(dtype, [3], 0, 3 * size // 8)}}}', 3 * size // 8
            yield f"{dtype} of 1", f'{{"a":{tensor(dtype, [], 0, 1)}}}', 1
    for dtype in OTHER_TYPES:
        yield f"type {dtype!r}", f'{{"a":{tensor(dtype, [1], 0, 4)}}}', 4
    for dtype in ('{"U8":null}', '{"U8":{}}', '{"U8":1}', '{"U8":null,"I8":null}', "{}", "null", "4", '["U8"]'):
        yield f"type is {dtype}", f'{{"a":{{"dtype":{dtype},"shape":[1],"data_offsets":[0,1]}}}}', 1
    # Shapes.
    large = 2**62
    for shape, size in (
        ([], 1), ([1], 1), ([0], 0), ([2, 0, 3], 0), ([0, large, large], 0), ([large, large, 0], 0), ([large, 0], 0),
        ([2**64 - 1, 0], 0), ([2**64, 0], 0), ([2**61], 0), ([2**61, 0], 0), ([2**32, 2**32], 0), ([1] * 64, 1),
        ([1] * 1000, 1), ([2], 1), ([1], 2), ([-1], 1), ([1, -1, -1], 1), ([1.0], 1), ([1.5], 1), ([True], 1),
        ([None], 0), (["1"], 1), ([[1]], 1),
    ):
        text = json.dumps(shape)
        yield f"shape {text[:60]}", f'{{"a":{tensor("U8", text, 0, size)}}}', size
    for text in ("null", "{}", '"1"', "1", "[1e0]", "[-0]", "[01]", "[1,]", "[,1]", "[+1]", "[ 1 ]", "[0x1]"):
        yield f"shape {text}", f'{{"a":{tensor("U8", text, 0, 1)}}}', 1
    # Offsets.
    for name, one, other, data in (
        ("two", (0, 4), (4, 8), 8), ("two in reverse", (4, 8), (0, 4), 8), ("a hole", (0, 4), (5, 8), 8),
        ("an overlap", (0, 4), (3, 8), 8), ("the same place", (0, 4), (0, 4), 4), ("not at 0", (1, 4), (4, 8), 8),
        ("data too short", (0, 4), (4, 8), 7), ("data too long", (0, 4), (4, 8), 9), ("an empty one", (0, 0), (0, 4), 4),
        ("an empty one last", (0, 4), (4, 4), 4), ("an empty one inside", (0, 4), (2, 2), 4),
        ("an empty one after the end", (0, 4), (5, 5), 4), ("two empty ones", (0, 0), (0, 0), 0),
        ("an unaligned one", (0, 3), (3, 8), 8),
    ):
        yield name, f'{{"a":{u8(*one)},"b":{u8(*other)}}}', data
    for offsets in (
        "[1,0]", "[0]", "[]", "[0,1,1]", "[0,-1]", "[0,1.0]", "null", '["0","1"]', '{"0":0,"1":1}', "[0,18446744073709551616]",
        "[18446744073709551614,18446744073709551615]", "[0,2]",
    ):
        yield f"offsets {offsets}", f'{{"a":{{"dtype":"U8","shape":[1],"data_offsets":{offsets}}}}}', 1
    # Repeated names and fields.
    yield "a name twice", f'{{"a":{ONE},"a":{ONE}}}', 1
    yield "a name twice, escaped once", f'{{"a":{ONE},"\\u0061":{ONE}}}', 1
    yield "a name twice, other places", f'{{"a":{u8(0, 1)},"a":{u8(1, 2)}}}', 2
    yield "a name twice, the last right", f'{{"a":{u8(0, 4)},"a":{ONE}}}', 1
    yield "a name twice, the first right", f'{{"a":{ONE},"a":{u8(0, 4)}}}', 1
    yield "a name twice, the first of another size", f'{{"a":{tensor("U8", [9], 7, 4)},"a":{ONE}}}', 1
    yield "a name twice, the first of no type", f'{{"a":{tensor("U9", [1], 0, 1)},"a":{ONE}}}', 1
    yield "a name twice, the first null", f'{{"a":null,"a":{ONE}}}', 1
    yield "a name three times", f'{{"a":{u8(0, 1)},"b":{u8(1, 2)},"a":{u8(2, 3)},"a":{u8(0, 1)}}}', 2
    for field in ('"dtype":"U8"', '"shape":[1]', '"data_offsets":[0,1]'):
        yield f"{field} twice", f'{{"a":{tensor("U8", [1], 0, 1, "," + field)}}}', 1
    # Fields.
    yield "no fields", '{"a":{}}', 0
    yield "no type", '{"a":{"shape":[1],"data_offsets":[0,1]}}', 1
    yield "no shape", '{"a":{"dtype":"U8","data_offsets":[0,1]}}', 1
    yield "no offsets", '{"a":{"dtype":"U8","shape":[1]}}', 1
    yield "fields in another order", '{"a":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"}}', 1
    yield "a field in capitals", '{"a":{"Dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1
    for value in (
        "1", "null", '"x"', "[1,[2,{}]]", '{"y":{"z":[]}}', "-1.5e3", "1e999", "-1e999", "1e-999", "1" + "0" * 40,
        '"\\ud800"', '{"\\ud800":1}', '"\\x"', "[" * 125 + "]" * 125, "[" * 126 + "]" * 126, "nul", "[1,]", "",
    ):
        field = f',"x":{value}'
        yield f"unknown field {value[:30]}", f'{{"a":{tensor("U8", [1], 0, 1, field)}}}', 1
    field = ',"x":1,"x":2'
    yield "unknown field twice", f'{{"a":{tensor("U8", [1], 0, 1, field)}}}', 1
    for value in (
        '["U8",[1],[0,1]]', '["U8",[1]]', '["U8",[1],[0,1],1]', "[]", "null", "1", '"U8"', '[[1],"U8",[0,1]]',
        '[{"U8":null},[1],[0,1]]',
    ):
        yield f"tensor is {value}", f'{{"a":{value}}}', 1


def verdict(file: bytes, path: pathlib.Path) -> str:
    def is_accepted(read) -> bool:
        try:
            read()
        except (safetensors.SafetensorError, ValueError, OverflowError):
            return False
        return True

    def from_file():
        with safetensors.safe_open(path, "np") as opened:
            opened.keys()

    path.write_bytes(file)
    verdicts = {is_accepted(from_file), is_accepted(lambda: safetensors.deserialize(file))}
    assert len(verdicts) == 1, (file[:200], verdicts)
    return "accepted" if verdicts.pop() else "refused"


def escaped(header: bytes) -> str:
    plain = lambda byte: 0x20 <= byte < 0x7F and byte != 0x5C
    return "".join(chr(byte) if plain(byte) else f"\\x{byte:02x}" for byte in header)


def main() -> None:
    print(f"# safetensors {safetensors.__version__}; made by tests/safetensors_cases.py, which explains the columns")
    with tempfile.TemporaryDirectory() as folder:
        for name, header, data, *more in cases():
            length, spaces = (*more, None, None)[:2]
            header = header if isinstance(header, bytes) else header.encode()
            whole = header + b" " * (spaces or 0)
            stated = len(whole) if length is None else length
            file = struct.pack("<Q", stated) + whole + bytes(data) if stated >= 0 else b""
            row = (
                verdict(file, pathlib.Path(folder) / "file"), escaped(name.encode()), "-" if length is None else length,
                spaces or 0, data, escaped(header),
            )
            print(*row, sep="\t")
    print(f"checked with {sys.version.split()[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
