#!/usr/bin/env python3
"""Checks what a GGUF file shares with the safetensors model it was converted from: `just converted CONVERTER`

CONVERTER is llama.cpp's `convert_hf_to_gguf.py`, in a folder with its modules. Generates small random models of three
architectures with transformers, converts each to a BF16 GGUF file, and imports both into a new store. The script itself
compares the files to find the tensors that the conversion did not change: blobd must share these and no others.
Separate experts in one file must share every byte with a file in which the same experts are stacked.

Needs `pip install transformers torch sentencepiece gguf`. Exits with 1 at the first difference, and with 0 if the
converter or a package is absent.
"""

import hashlib
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

ARCHITECTURES = ("Llama", "Mixtral", "Gemma2")
EXPERTS = 8


def main() -> None:
    blobd, converter = sys.argv[1:]
    if not pathlib.Path(converter).is_file():
        skip(f"{converter} does not exist")
    try:
        import sentencepiece  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        skip(str(error))
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        tokenizer = make_tokenizer(work)
        print(f"{'':20} {'tensors of the GGUF':>20} {'unchanged':>20} {'shared':>20} {'of all':>8}")
        for name in ARCHITECTURES:
            folder, file = work / name, work / f"{name}.gguf"
            make_model(name, folder)
            shutil.copy(tokenizer, folder)
            convert(converter, folder, file)
            compare(Store(blobd, work / f"store-{name}"), name, folder, file)
        compare_experts(Store(blobd, work / "store-stacked"), work)


class Store:
    def __init__(self, blobd: str, root: pathlib.Path) -> None:
        self.command = [blobd, "--root", str(root)]

    def run(self, *arguments: str) -> bytes:
        return subprocess.run([*self.command, *arguments], check=True, stdout=subprocess.PIPE).stdout

    def tensors(self, name: str) -> list:
        return json.loads(self.run("show", name, "--json"))["tensors"]


def make_tokenizer(work: pathlib.Path) -> pathlib.Path:
    """Trains on random words. The converter accepts any SentencePiece tokenizer, but no unknown one of other kinds."""
    import sentencepiece

    chosen = random.Random(1)
    words = ["".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=chosen.randint(2, 7))) for _ in range(400)]
    text = work / "words.txt"
    text.write_text("\n".join(" ".join(chosen.choices(words, k=12)) for _ in range(2000)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(work / "tokenizer"), vocab_size=512, model_type="bpe", byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    return work / "tokenizer.model"


def make_model(name: str, folder: pathlib.Path) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    own = {"Mixtral": {"num_local_experts": EXPERTS}, "Gemma2": {"tie_word_embeddings": True}}.get(name, {})
    config = getattr(transformers, f"{name}Config")(bos_token_id=1, eos_token_id=2, **sizes, **heads, **own)
    getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)


def convert(converter: str, folder: pathlib.Path, file: pathlib.Path) -> None:
    command = [sys.executable, converter, str(folder), "--outtype", "bf16", "--outfile", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compare(store: Store, name: str, folder: pathlib.Path, file: pathlib.Path) -> None:
    import gguf

    contents = source_contents(folder)
    theirs = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(file).tensors}
    unchanged = {key for key, value in theirs.items() if digest(value) in contents}
    store.run("import", str(folder), "--name", "source")
    store.run("import", str(file), "--name", "converted")
    known = {tensor["digest"] for tensor in store.tensors("source")}
    ours = {tensor["name"]: tensor for tensor in store.tensors("converted")}
    shared = {key for key, tensor in ours.items() if tensor["digest"] in known}
    require(set(ours) == set(theirs), f"{name}: tensors missing or unexpected: {sorted(set(ours) ^ set(theirs))}")
    require(shared == unchanged, f"{name}: shared but changed, or unchanged but not shared: {sorted(shared ^ unchanged)}")
    counted = [sum(len(theirs[key]) for key in keys) for keys in (theirs, unchanged, shared)]
    print(f"{name:20} {counted[0]:20,} {counted[1]:20,} {counted[2]:20,} {counted[2] / counted[0]:8.1%}")
    changed = sorted({key.split(".", 2)[-1] if key.startswith("blk.") else key for key in theirs if key not in shared})
    print(f"  changed by the converter: {', '.join(changed)}")
    exported = store.run("export", "converted", "-o", "-")
    require(digest(exported) == digest(file.read_bytes()), f"{name}: exported file differs")


def source_contents(folder: pathlib.Path) -> set:
    """The digests of the model's tensors and of its stacked experts."""
    tensors = read_safetensors(folder / "model.safetensors")
    stacks = stacked(tensors)
    return {digest(content) for content in [*(content for content, _ in tensors.values()), *stacks.values()]}


def read_safetensors(file: pathlib.Path) -> dict:
    """Reads the bytes and the shape of each tensor, without a library."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (raw[start + begin : start + end], header[name]["shape"]) for name, (begin, end) in offsets.items()}


def stacked(tensors: dict) -> dict:
    """Concatenates the experts of each projection."""
    first = [name for name in tensors if ".experts.0." in name]
    names = {name: [name.replace(".experts.0.", f".experts.{number}.") for number in range(EXPERTS)] for name in first}
    return {name: b"".join(tensors[each][0] for each in all_experts) for name, all_experts in names.items()}


def compare_experts(store: Store, work: pathlib.Path) -> None:
    """Compares a file with separate experts and a file with the same experts stacked."""
    separate = work / "Mixtral" / "model.safetensors"
    tensors = read_safetensors(separate)
    header, data = {}, b""
    for name, content in stacked(tensors).items():
        matrix = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[name.split(".")[-2]]
        layer = name.split(".block_sparse_moe")[0]
        entry = {"dtype": "BF16", "shape": [EXPERTS, *tensors[name][1]], "data_offsets": [len(data), len(data) + len(content)]}
        header[f"{layer}.mlp.experts.{matrix}"] = entry
        data += content
    text = json.dumps(header).encode()
    file = work / "stacked.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    store.run("import", str(separate), "--name", "separate")
    store.run("import", str(file), "--name", "stacked")
    known = {tensor["digest"] for tensor in store.tensors("separate")}
    shared = sum(tensor["size"] for tensor in store.tensors("stacked") if tensor["digest"] in known)
    require(shared == len(data), f"stacked experts: {shared:,} of {len(data):,} bytes are shared")
    print(f"{'stacked experts':20} {len(data):20,} {len(data):20,} {shared:20,} {shared / len(data):8.1%}")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require(holds: bool, error: str) -> None:
    if not holds:
        raise SystemExit(f"converted.py: {error}")


def skip(reason: str) -> None:
    print(f"skipped: {reason}")
    raise SystemExit(0)


main()
