#!/usr/bin/env python3
"""Checks that huggingface_hub and blobd read each other's models: `just hub-stores FOLDER`

FOLDER is a model of safetensors and other files. A small hub server on loopback serves it as two repositories with two
commits. The installed version of huggingface_hub downloads them into a cache; version 2 also creates its store of shared
blobs. blobd imports the cache, and must export every file bit for bit; another store pulls from the hub. For both
stores, the library must then find every file, offline and without a warning, in the hub tree of `blobd mount`.

Needs `pip install huggingface_hub`; the mount is skipped without /dev/fuse. Exits with 1 at the first difference.
"""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

COMMITS = ("a" * 40, "b" * 40)
REPOSITORIES = ("me/one", "me/two")
LARGE_BYTES = 100_000
TAG_DIGITS = 12


class Hub(http.server.ThreadingHTTPServer):
    """Serves the part of the hub's API that these two clients use."""

    def __init__(self, files: dict) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.files = files
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def tree(self, commit: str) -> list:
        return [describe(path, content) for path, content in sorted(self.files[commit].items())]


def describe(path: str, content: bytes) -> dict:
    entry = {"type": "file", "path": path, "size": len(content), "oid": git_id(content)}
    if len(content) < LARGE_BYTES:
        return entry
    lfs = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
    return {**entry, "oid": git_id(b"pointer " + path.encode()), "lfs": lfs}


class Requests(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"] and "/".join(path[2:4]) in REPOSITORIES:
            self.send_document(*path[4:])
        elif "/".join(path[:2]) in REPOSITORIES and path[2] == "resolve":
            self.send_file(self.commit(path[3]), "/".join(path[4:]))
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def commit(self, revision: str) -> str:
        return COMMITS[0] if revision == "main" else revision

    def send_document(self, kind: str, revision: str = "main", *_: str) -> None:
        commit = self.commit(revision)
        if kind == "refs":
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": COMMITS[0]}
            document: object = {"branches": [branch], "tags": [], "converts": []}
        elif kind == "tree":
            document = self.server.tree(commit)
        else:
            siblings = [{"rfilename": path} for path in self.server.files[commit]]
            document = {"id": "/".join(self.path.split("/")[3:5]), "sha": commit, "siblings": siblings}
        self.send_bytes(json.dumps(document).encode(), {"Content-Type": "application/json"})

    def send_file(self, commit: str, path: str) -> None:
        content = self.server.files[commit].get(path)
        if content is None:
            self.send_error(404, "Entry not found", "EntryNotFound")
            return
        entry = describe(path, content)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        self.send_bytes(content, {**headers, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})

    def send_bytes(self, content: bytes, headers: dict) -> None:
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes=") and "," not in wanted:
            first, _, last = wanted[6:].partition("-")
            begin, end = int(first), min(int(last) + 1 if last else len(content), len(content))
            headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
            content = content[begin:end]
        self.send_response(206 if "Content-Range" in headers else 200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Store:
    """A daemon with its own store, and its mount."""

    def __init__(self, blobd: str, root: pathlib.Path, hub: Hub) -> None:
        root.mkdir()
        self.blobd, self.mount = blobd, root / "mnt"
        config = root / "config.toml"
        config.write_text(f'[mirrors]\n"hf.co" = "{hub.url}"\n')
        variables = {"BLOBD_SOCKET": str(root / "s"), "BLOBD_CONFIG": str(config)}
        self.environment = {**os.environ, **variables}
        self.started = [self.start("--root", str(root / "store"), "serve")]
        wait_for((root / "s").exists)

    def start(self, *arguments: str) -> subprocess.Popen:
        quiet = subprocess.DEVNULL
        return subprocess.Popen([self.blobd, *arguments], env=self.environment, stdout=quiet, stderr=quiet)

    def run(self, *arguments: str) -> bytes:
        run = subprocess.run([self.blobd, *arguments], env=self.environment, check=True, stdout=subprocess.PIPE)
        return run.stdout

    def names(self) -> list:
        return [model["name"] for model in json.loads(self.run("ls", "--json"))["models"]]

    def mount_tree(self) -> bool:
        if not os.access("/dev/fuse", os.W_OK):
            print("  skipped: the mount (/dev/fuse does not exist or is not writable)")
            return False
        self.mount.mkdir()
        self.started.append(self.start("mount", str(self.mount)))
        wait_for(lambda: os.path.ismount(self.mount))
        return True

    def stop(self) -> None:
        for process in reversed(self.started):
            process.terminate()
            process.wait()


def main() -> None:
    blobd, folder = sys.argv[1:]
    try:
        import huggingface_hub
    except ImportError as error:
        print(f"skipped: {error}")
        return
    version = huggingface_hub.__version__
    with tempfile.TemporaryDirectory() as directory:
        work = pathlib.Path(directory)
        first = read_files(pathlib.Path(folder))
        hub = Hub(dict(zip(COMMITS, (first, {**first, "README.md": b"# Another commit\n"}))))
        cache = work / "cache"
        for repository in REPOSITORIES:
            download(cache, repository, HF_ENDPOINT=hub.url)
        download(cache, REPOSITORIES[0], COMMITS[1], HF_ENDPOINT=hub.url)
        shared = share_blobs(cache, first)
        print(f"huggingface_hub {version}: a cache of {len(first)} files, {shared} of them in its shared store")
        check_import(Store(blobd, work / "imported", hub), cache, hub)
        check_pull(Store(blobd, work / "pulled", hub), hub)
    print("passed")


def check_import(store: Store, cache: pathlib.Path, hub: Hub) -> None:
    try:
        store.run("import", f"--from-hf={cache}")
        names = store.names()
        require(len(names) == 3, f"imported: expected 3 models, found {names}")
        for name in names:
            commit = COMMITS[1] if name.endswith(COMMITS[1][:TAG_DIGITS]) else COMMITS[0]
            compare_export(store, name, hub.files[commit])
        print(f"  imported: {', '.join(names)}; all files bit for bit")
        compare_tree(store, hub, [*((each, None) for each in REPOSITORIES), (REPOSITORIES[0], COMMITS[1])])
    finally:
        store.stop()


def check_pull(store: Store, hub: Hub) -> None:
    try:
        store.run("pull", f"hf.co/{REPOSITORIES[0]}", "--include", "*")
        (name,) = store.names()
        compare_export(store, name, hub.files[COMMITS[0]])
        print(f"  pulled: {name}; all files bit for bit")
        compare_tree(store, hub, [(REPOSITORIES[0], None)])
    finally:
        store.stop()


def compare_export(store: Store, name: str, files: dict) -> None:
    with tempfile.TemporaryDirectory() as directory:
        target = pathlib.Path(directory, "model")
        store.run("export", name, "-o", f"{target}/")
        compare_files(f"export of {name}", target, files)


def compare_tree(store: Store, hub: Hub, revisions: list) -> None:
    """Reads the mounted tree with the library, offline."""
    if not store.mount_tree():
        return
    tree = store.mount / "hub"
    for repository, revision in revisions:
        found = download(tree, repository, revision, HF_HUB_OFFLINE="1")
        compare_files(f"{repository} in the mount", pathlib.Path(found), hub.files[revision or COMMITS[0]])
    script = "import huggingface_hub, sys; print(*map(str, huggingface_hub.scan_cache_dir(sys.argv[1]).warnings))"
    warnings = subprocess.run([sys.executable, "-c", script, str(tree)], check=True, stdout=subprocess.PIPE).stdout
    require(not warnings.strip(), f"scan_cache_dir: {warnings.decode()}")
    print(f"  mounted: {len(revisions)} snapshots found offline by the library, all files bit for bit, no warnings")


def compare_files(what: str, folder: pathlib.Path, files: dict) -> None:
    found = read_files(folder)
    require(set(found) == set(files), f"{what}: files missing or unexpected: {sorted(set(found) ^ set(files))}")
    for path, content in files.items():
        require(found[path] == content, f"{what}: {path} differs")


def read_files(folder: pathlib.Path) -> dict:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".gitattributes")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def download(cache: pathlib.Path, repository: str, revision: object = None, **variables: str) -> str:
    """`snapshot_download` in a process of its own: the library reads its environment once."""
    script = "import huggingface_hub, sys; print(huggingface_hub.snapshot_download(sys.argv[1], revision=sys.argv[2] or None))"
    settings = {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [sys.executable, "-c", script, repository, str(revision or "")]
    run = subprocess.run(command, env={**environment, **settings, **variables}, check=True, stdout=subprocess.PIPE)
    return run.stdout.decode().strip().splitlines()[-1]


def share_blobs(cache: pathlib.Path, files: dict) -> int:
    """Moves the large files into the library's store of shared blobs, as the library does after a download by Xet."""
    try:
        from huggingface_hub.utils import _shared_blobs as store
    except ImportError:
        return 0
    large = [content for content in files.values() if len(content) >= LARGE_BYTES]
    for content in large:
        name, size = sha256(b"xet" + content), len(content)
        for repository in REPOSITORIES:
            blob = cache / f"models--{repository.replace('/', '--')}" / "blobs" / sha256(content)
            done = store.publish_blob_to_shared_store(
                blob_path=str(blob), xet_hash=name, cache_dir=str(cache), expected_size=size
            )
            require(done and blob.is_symlink(), f"{blob}: not shared")
    return len(large)


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wait_for(holds: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        require(time.monotonic() < end, f"daemon or mount: not ready after {seconds} s")
        time.sleep(0.05)


def require(holds: object, error: str) -> None:
    if not holds:
        raise SystemExit(f"hub_stores.py: {error}")


main()
