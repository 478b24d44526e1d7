#!/usr/bin/env python3
"""Checks edited and rewritten models with independent tools: `just rewrite FILE.gguf…`

Each file, a copy aligned to 4096 bytes and a big-endian copy are each imported into a new
store. PyPI's `gguf` then reads what blobd writes and must find

- after `edit`: exactly the keys that were changed, and the same bytes for every tensor;
- after `export --alignment`, `--split-max-size` and `--merge`: the same keys and tensors;
- after `export --endian`: the bytes that gguf's own converter writes;
- for `show --hash`: the hashes that gguf's own script computes.

`llama-gguf-hash` and `llama-gguf-split` are used if they are found in `$LLAMA_BIN` or in
`$PATH`. Needs `pip install gguf`. Exits with 1 at the first difference.
"""

import contextlib
import functools
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading

import gguf

ALIGNMENT = "general.alignment"
SCRIPTS = pathlib.Path(gguf.__file__).parent / "scripts"


def main() -> None:
    blobd, *files = sys.argv[1:]
    skipped: set[str] = set()
    for file in map(pathlib.Path, files):
        with tempfile.TemporaryDirectory() as directory:
            check(blobd, pathlib.Path(directory), file, skipped)
    for reason in sorted(skipped):
        print(f"skipped: {reason}")


def check(blobd: str, directory: pathlib.Path, file: pathlib.Path, skipped: set[str]) -> None:
    plain = Case(blobd, directory / "plain", file, skipped)
    aligned = plain.export("aligned.gguf", "--alignment", "4096")
    plain.check_same(plain.file, aligned, ignored={ALIGNMENT})
    require(gguf.GGUFReader(aligned).alignment == 4096, f"{file}: alignment")
    forms = [plain, Case(blobd, directory / "aligned", aligned, skipped)]
    big = plain.check_endian()
    forms.extend([Case(blobd, directory / "big", big, skipped)] if big else [])
    for form in forms:
        form.check_edit()
        form.check_hashes()
    plain.check_shards()
    print(f"{file.name}: {len(forms)} forms edited, rewritten and hashed")


class Case:
    """A store with one model, `m`."""

    def __init__(self, blobd: str, directory: pathlib.Path, file: pathlib.Path, skipped: set[str]) -> None:
        self.blobd, self.directory, self.file, self.skipped = blobd, directory, file, skipped
        directory.mkdir()
        self.run("import", str(file), "--name", "m")

    def run(self, *arguments: str) -> bytes:
        return subprocess.check_output([self.blobd, "--root", str(self.directory / "store"), *arguments])

    def export(self, name: str, *arguments: str, model: str = "m") -> pathlib.Path:
        path = self.directory / name
        self.run("export", model, "-o", str(path), *arguments)
        return path

    def tool(self, name: str) -> str | None:
        found = shutil.which(name, path=os.environ.get("LLAMA_BIN")) or shutil.which(name)
        if found is None:
            self.skipped.add(f"{name} is not installed")
        return found

    def check_same(self, before: pathlib.Path, after: pathlib.Path, ignored: set[str] = frozenset()) -> None:
        """The same keys in the same order with the same types and bytes, and the same tensors."""
        one, two = gguf.GGUFReader(before), gguf.GGUFReader(after)
        require(keys(one, ignored) == keys(two, ignored), f"{after}: keys differ from {before}")
        self.check_tensors(one, two, str(after))

    def check_tensors(self, one: gguf.GGUFReader, two: gguf.GGUFReader, name: str) -> None:
        pairs = list(zip(one.tensors, two.tensors))
        require(len(one.tensors) == len(two.tensors), f"{name}: {len(two.tensors)} tensors")
        for a, b in pairs:
            require((a.name, a.tensor_type) == (b.name, b.tensor_type), f"{name}: {a.name} is {b.name}")
            require(list(a.shape) == list(b.shape), f"{name}: {a.name}: shape")
            require(a.data.tobytes() == b.data.tobytes(), f"{name}: {a.name}: bytes")

    def check_edit(self) -> None:
        before = gguf.GGUFReader(self.file)
        old = keys(before)
        removed = next((key for key in old if key.startswith("general.") and key not in FIXED), None)
        template = self.directory / "template"
        template.write_text("{% for message in messages %}\n{{ message }}{% endfor %}é")
        edits = ["--set", "blobd.number=-7", "--set", "blobd.list:array<uint16>=[1,65535]"]
        edits += ["--template", f"@{template}"] + (["--unset", removed] if removed else [])
        blobs = {blob.name: blob.stat().st_size for blob in (self.directory / "store/blobs").iterdir()}
        edited = json.loads(self.run("edit", "m", "n", *edits, "--json"))
        now = {blob.name: blob.stat().st_size for blob in (self.directory / "store/blobs").iterdir()}
        after_file = self.export("edited.gguf", model="n")
        after = gguf.GGUFReader(after_file)
        new = keys(after)
        changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
        expected = {"blobd.number", "blobd.list", "tokenizer.chat_template"} | ({removed} - {None})
        require(changed == expected, f"{self.file}: changed keys: expected {expected}, found {changed}")
        require({entry["key"] for entry in edited["changed"]} == expected, f"{self.file}: report of the edit")
        value = lambda key: after.get_field(key).contents()
        require(value("blobd.number") == -7 and value("blobd.list") == [1, 65535], f"{self.file}: values")
        require(value("tokenizer.chat_template") == template.read_text(), f"{self.file}: template")
        kept = [key for key in old if key != removed]
        require([key for key in new if key in old] == kept, f"{self.file}: the order of the keys")
        require(after.alignment == before.alignment, f"{self.file}: alignment")
        self.check_tensors(before, after, str(after_file))
        # Only the header and the configuration are stored; the tensors have the same digests.
        added = sum(now.values()) - sum(blobs.values())
        header = after.data_offset
        require(added <= header + 1024, f"{self.file}: {added} bytes stored for a header of {header}")
        digests = lambda name: [t["digest"] for t in json.loads(self.run("show", name, "--json"))["tensors"]]
        require(digests("m") == digests("n"), f"{self.file}: digests of the tensors")
        self.run("verify")
        require(self.export("m.gguf").read_bytes() == self.file.read_bytes(), f"{self.file}: the source")

    def check_endian(self) -> pathlib.Path | None:
        """Converts to big-endian and back, and with gguf's own converter. Returns the big-endian file."""
        big = self.export("big.gguf", "--endian", "big")
        converted = self.directory / "converted.gguf"
        shutil.copy(self.file, converted)
        script = [sys.executable, str(SCRIPTS / "gguf_convert_endian.py"), str(converted), "big"]
        run = subprocess.run(script, input=b"YES\n", capture_output=True)
        if run.returncode == 0:
            self.check_same(converted, big)
        else:
            reason = run.stderr.decode().strip().splitlines()[-1]
            self.skipped.add(f"gguf's byte order converter refuses {self.file.name}: {reason}")
        case = Case(self.blobd, self.directory / "back", big, self.skipped)
        self.check_same(self.file, case.export("little.gguf", "--endian", "little"))
        return big

    def check_hashes(self) -> None:
        ours = self.run("show", "m", "--hash=all").decode().splitlines()
        copy = self.directory / "m-latest.gguf"
        self.run("export", "m", "-o", str(copy))
        script = [sys.executable, str(SCRIPTS / "gguf_hash.py"), copy.name]
        theirs = subprocess.check_output(script, cwd=self.directory, stderr=subprocess.DEVNULL).decode().splitlines()
        known = [line.split() for line in ours if not line.startswith("xxh64")]
        require(known == [line.split() for line in theirs], f"{self.file}: hashes of gguf_hash.py")
        is_little = gguf.GGUFReader(self.file).endianess == gguf.GGUFEndian.LITTLE
        if is_little and (tool := self.tool("llama-gguf-hash")):
            command = [tool, "--all", "--uuid", copy.name]
            theirs = subprocess.run(command, cwd=self.directory, capture_output=True, check=True).stdout.decode()
            require(ours == theirs.splitlines(), f"{self.file}: hashes of llama-gguf-hash")
            manifest = self.directory / "manifest"
            manifest.write_text(theirs)
            self.run("show", "m", "--check", str(manifest))

    def check_shards(self) -> None:
        reader = gguf.GGUFReader(self.file)
        largest = max((int(tensor.n_bytes) for tensor in reader.tensors), default=0)
        maximum = max(largest + 32, self.file.stat().st_size // 3)
        folder = self.directory / "shards"
        folder.mkdir()
        self.run("export", "m", "--split-max-size", f"{maximum}B", "-o", str(folder))
        shards = sorted(folder.iterdir())
        require(len(shards) > 1, f"{self.file}: {len(shards)} shards of at most {maximum} bytes")
        tensors = [tensor.name for shard in shards for tensor in gguf.GGUFReader(shard).tensors]
        require(tensors == [tensor.name for tensor in reader.tensors], f"{self.file}: tensors of the shards")
        if tool := self.tool("llama-gguf-split"):
            merged = self.directory / "merged.gguf"
            command = [tool, "--merge", str(shards[0]), str(merged)]
            subprocess.run(command, capture_output=True, check=True)
            split = {"split.no", "split.count", "split.tensors.count"}
            self.check_same(self.file, merged, ignored=split)
        with serve(folder) as url:
            self.run("pull", f"{url}/{shards[0].name}", "--name", "sharded")
        self.check_same(self.file, self.export("joined.gguf", "--merge", model="sharded"))


FIXED = {"general.architecture", ALIGNMENT}


def keys(reader: gguf.GGUFReader, ignored: set[str] = frozenset()) -> dict[str, tuple]:
    """Type and value of each key, in the order of the file."""
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    value = lambda field: (field.types, b"".join(field.parts[part].tobytes() for part in field.data))
    return {name: value(field) for name, field in fields.items() if name not in ignored}


class serve:
    """A web server for a directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        handler = functools.partial(Quiet, directory=str(directory))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def copyfile(self, *arguments: object) -> None:
        # A client that wants only the start of a file closes the connection.
        with contextlib.suppress(ConnectionError):
            super().copyfile(*arguments)


def require(holds: bool, error: str) -> None:
    if not holds:
        sys.exit(error)


if __name__ == "__main__":
    main()
