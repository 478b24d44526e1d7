#!/usr/bin/env python3
"""Compares blobd with an independent reader: `just oracle FILE.gguf…`

Imports each file into a new store, then checks against PyPI's `gguf`:
every tensor's name, type and shape; that its digest is the SHA-256 of the raw
bytes that this reader finds; that the blob with this digest has this content;
and that the exported file has the SHA-256 of the original.

Needs `pip install gguf`. Exits with 1 at the first difference.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf


def main() -> None:
    blobd, *files = sys.argv[1:]
    for file in map(pathlib.Path, files):
        with tempfile.TemporaryDirectory() as directory:
            compare(Store(blobd, pathlib.Path(directory, "store")), file)


class Store:
    def __init__(self, blobd: str, root: pathlib.Path) -> None:
        self.blobd, self.root = blobd, root

    def run(self, *arguments: str) -> bytes:
        return subprocess.check_output([self.blobd, "--root", str(self.root), *arguments])

    def blob(self, digest: str) -> bytes:
        return (self.root / "blobs" / digest.replace(":", "-")).read_bytes()


def compare(store: Store, file: pathlib.Path) -> None:
    store.run("import", str(file), "--name", "oracle")
    ours = {tensor["name"]: tensor for tensor in json.loads(store.run("show", "oracle", "--json"))["tensors"]}
    raw = file.read_bytes()
    theirs = gguf.GGUFReader(file).tensors
    require(len(ours) == len(theirs), f"{file}: expected {len(theirs)} tensors, found {len(ours)}")
    for tensor in theirs:
        compare_tensor(store, ours[tensor.name], tensor, raw)
    exported = store.run("export", "oracle", "-o", "-")
    require(sha256(exported) == sha256(raw), f"{file}: exported file differs")
    print(f"{file.name}: {len(theirs)} tensors and the exported file agree")


def compare_tensor(store: Store, ours: dict, theirs: gguf.ReaderTensor, raw: bytes) -> None:
    name, start = theirs.name, theirs.data_offset
    content = raw[start : start + int(theirs.n_bytes)]
    type_, shape = theirs.tensor_type.name, [int(length) for length in theirs.shape]
    require(ours["type"] == type_, f"{name}: expected type {type_}, found {ours['type']}")
    require(ours["shape"] == shape, f"{name}: expected shape {shape}, found {ours['shape']}")
    blob = store.blob(ours["digest"])
    require(sha256(blob) == ours["digest"], f"{name}: the blob does not have the digest in its name")
    require(blob[ours["offset"] :][: ours["size"]] == content, f"{name}: the bytes differ from those that the reader finds")
    if ours["offset"] == 0 and len(blob) == len(content):
        require(sha256(content) == ours["digest"], f"{name}: digest {ours['digest']}")


def sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def require(holds: bool, error: str) -> None:
    if not holds:
        sys.exit(error)


if __name__ == "__main__":
    main()
