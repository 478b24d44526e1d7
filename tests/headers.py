#!/usr/bin/env python3
"""Compares `blobd show --full --json` with an independent reader: `just headers [FILE.gguf…]`

For each file, and for 200 files that it generates, checks against PyPI's `gguf`:
version, byte order, alignment and data offset; every key in order with its type and
whole value; every tensor's name, type, shape, size and position in the file.
Each given file is also imported and compared again, described from the store.

Exceptions: gguf 0.19.0 assumes 40 bytes instead of 36 for a block of Q8_1 and does not
know type 42 (Q2_0) and Ollama's type 4, so no generated file has them.

Needs `pip install gguf`. Exits with 1 at the first difference.
"""

import json
import math
import pathlib
import random
import string
import subprocess
import sys
import tempfile

import gguf
import numpy

GENERATED = 200
VALUE_TYPES = gguf.GGUFValueType
UNKNOWN_TO_THE_READER = {"Q8_1"}


def main() -> None:
    blobd, *files = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        for file in map(pathlib.Path, files):
            compare(shown(blobd, folder, str(file.resolve())), file)
            run(blobd, folder, "import", str(file), "--name", "m:1")
            compare(shown(blobd, folder, "m:1"), file)
            print(f"{file}: equal")
        for seed in range(GENERATED):
            file = generate(random.Random(seed), folder / f"generated-{seed}.gguf")
            compare(shown(blobd, folder, str(file)), file)
            file.unlink()
        print(f"{GENERATED} generated files: equal")


def run(blobd: str, folder: pathlib.Path, *arguments: str) -> bytes:
    return subprocess.check_output([blobd, "--root", str(folder / "store"), *arguments])


def shown(blobd: str, folder: pathlib.Path, model: str) -> dict:
    return json.loads(run(blobd, folder, "show", model, "--full", "--json"))


def compare(found: dict, file: pathlib.Path) -> None:
    reader = gguf.GGUFReader(file)
    is_swapped = reader.byte_order == "S"
    expected = {
        "version": int(reader.fields["GGUF.version"].parts[-1][0]),
        "byte_order": "big" if is_swapped else "little",
        "alignment": reader.alignment,
        "data_offset": reader.data_offset,
    }
    check(file, "header", found["header"], expected)
    fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    check(file, "number of keys", len(found["keys"]), len(fields))
    for key, field in zip(found["keys"], fields):
        check(file, "key", key["key"], field.name)
        check(file, f"type of {field.name}", key["type"], type_name(field))
        check(file, f"value of {field.name}", key["value"], plain(field.contents()))
    check(file, "number of tensors", len(found["tensors"]), len(reader.tensors))
    for tensor, other in zip(found["tensors"], reader.tensors):
        check(file, "tensor", tensor["name"], other.name)
        check(file, other.name, tensor["type"], other.tensor_type.name)
        check(file, other.name, tensor["shape"], [int(length) for length in other.shape])
        check(file, other.name, tensor["size"], int(other.n_bytes))
        check(file, other.name, tensor["file_offset"], int(other.data_offset))


def check(file: pathlib.Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        sys.exit(f"{file}: {what}: blobd has {found!r}, gguf has {expected!r}")


def type_name(field: gguf.ReaderField) -> str:
    first, *rest = [value_type.name.lower() for value_type in field.types]
    if first != "array":
        return first
    # The reader does not give the element type of an empty array.
    return f"array<{rest[-1] if rest else int_type_of_empty(field)}>"


def int_type_of_empty(field: gguf.ReaderField) -> str:
    return VALUE_TYPES(int(field.parts[-2][0])).name.lower()


def plain(value: object) -> object:
    """The value as blobd writes it in JSON."""
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if isinstance(value, (bool, numpy.bool_)):
        return bool(value)
    if isinstance(value, (int, numpy.integer)):
        return int(value)
    if isinstance(value, (float, numpy.floating)):
        value = float(value)
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value
    return [] if value is None else value


def generate(random: random.Random, path: pathlib.Path) -> pathlib.Path:
    endian = random.choice([gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    if random.random() < 0.3:
        writer.add_custom_alignment(random.choice([8, 16, 64, 4096]))
    for number in range(random.randrange(12)):
        add_key(random, writer, f"{random.choice(['llama', 'general', 'größe'])}.key_{number}")
    for number in range(random.randrange(8)):
        add_tensor(random, writer, f"blk.{number}.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(random: random.Random, writer: gguf.GGUFWriter, key: str) -> None:
    scalars = [value_type for value_type in VALUE_TYPES if value_type != VALUE_TYPES.ARRAY]
    value_type = random.choice(scalars)
    if random.random() < 0.3:
        elements = [scalar(random, value_type) for _ in range(random.randrange(1, 200))]
        writer.add_key_value(key, elements, VALUE_TYPES.ARRAY, sub_type=value_type)
    else:
        writer.add_key_value(key, scalar(random, value_type), value_type)


def scalar(random: random.Random, value_type: gguf.GGUFValueType) -> object:
    name = value_type.name
    if name == "STRING":
        return "".join(random.choices(string.printable + "äß🦀\0", k=random.randrange(40)))
    if name == "BOOL":
        return random.random() < 0.5
    if name.startswith("FLOAT"):
        numbers = [0.0, -0.0, 1 / 3, 1e30, -1e-30, math.nan, math.inf, -math.inf, random.gauss(0, 1)]
        return random.choice(numbers)
    bits = int(name.removeprefix("U").removeprefix("INT"))
    low, high = (0, 2**bits - 1) if name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return random.choice([low, high, random.randint(low, high)])


def add_tensor(random: random.Random, writer: gguf.GGUFWriter, name: str) -> None:
    types = [ggml_type for ggml_type in gguf.GGMLQuantizationType if ggml_type.name not in UNKNOWN_TO_THE_READER]
    ggml_type = random.choice(types)
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    rows, blocks = random.randrange(1, 5), random.randrange(1, 4)
    data = numpy.frombuffer(random.randbytes(rows * blocks * size), dtype=numpy.uint8)
    writer.add_tensor(name, data.reshape(rows, blocks * size), raw_dtype=ggml_type)


if __name__ == "__main__":
    main()
