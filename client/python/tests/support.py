"""What the tests share: small GGUF files, a real daemon, a registry, and daemons that lie."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

# Number of a ggml type, elements of a block, bytes of a block.
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q8_0": (8, 32, 34)}

TensorSpec = Tuple[str, str, Tuple[int, ...], bytes]


def bytes_of(seed: str, size: int) -> bytes:
    """Bytes that look random and are the same for the same seed."""
    return hashlib.shake_128(seed.encode()).digest(size)


def tensor(name: str, kind: str, *shape: int, seed: str = "") -> TensorSpec:
    """A tensor with made-up bytes; numbers are finite where the type has any."""
    elements = 1
    for length in shape:
        elements *= length
    _, block, block_bytes = TYPES[kind]
    size = elements // block * block_bytes
    if kind == "F32":
        data = struct.pack(f"<{elements}f", *((byte - 128) / 8 for byte in bytes_of(seed or name, elements)))
    else:
        data = bytes_of(seed or name, size)
    return name, kind, shape, data


def string(text: str) -> bytes:
    """Text as GGUF has it."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(tensors: Sequence[TensorSpec], alignment: Optional[int] = 32, order: str = "<") -> bytes:
    """A GGUF file; `general.alignment` is left out if the alignment is `None`, which means 32."""

    def text(value: str) -> bytes:
        return struct.pack(order + "Q", len(value.encode())) + value.encode()

    keys = [text("general.architecture") + struct.pack(order + "I", 8) + text("llama")]
    if alignment is not None:
        keys.append(text("general.alignment") + struct.pack(order + "II", 4, alignment))
    words = [text(f"word{number}") for number in range(100)]
    keys.append(text("tokenizer.ggml.tokens") + struct.pack(order + "IIQ", 9, 8, 100) + b"".join(words))
    keys.append(text("tokenizer.ggml.scores") + struct.pack(order + "IIQ100f", 9, 6, 100, *range(100)))
    keys.append(text("tokenizer.ggml.add_bos_token") + struct.pack(order + "IB", 7, 1))
    infos, data = [], bytearray()
    for name, kind, shape, content in tensors:
        data += bytes(-len(data) % (alignment or 32))
        numbers = (len(shape), *shape, TYPES[kind][0], len(data))
        infos.append(text(name) + struct.pack(f"{order}I{len(shape)}QIQ", *numbers))
        data += content
    head = b"GGUF" + struct.pack(order + "IQQ", 3, len(tensors), len(keys)) + b"".join(keys + infos)
    return head + bytes(-len(head) % (alignment or 32)) + bytes(data) + bytes(-len(data) % (alignment or 32))


def binary() -> Optional[Path]:
    """The daemon's binary: what `BLOBD_BIN` names, or what cargo has built."""
    named = os.environ.get("BLOBD_BIN")
    if named:
        return Path(named)
    root = HERE.parent.parent.parent
    built = [root / "target" / profile / "blobd" for profile in ("debug", "release")]
    return next((path for path in built if path.exists()), None)


class Daemon:
    """`blobd serve` with a store of its own, and the files that the tests import."""

    def __init__(self) -> None:
        program = binary()
        if program is None:
            raise unittest.SkipTest("no blobd binary: `cargo build -p blobd`, or set BLOBD_BIN")
        self.program = program
        self.folder = Path(tempfile.mkdtemp(prefix="blobd-python-"))
        self.socket = str(self.folder / "blobd.sock")
        self.log = open(self.folder / "log", "wb")
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.start()

    def start(self) -> None:
        """Starts it, again if it was stopped, and waits until it answers."""
        import blobd

        self.process = subprocess.Popen(
            [str(self.program), "--root", str(self.folder / "store"), "serve", "--socket", self.socket],
            stdout=subprocess.DEVNULL,
            stderr=self.log,
            env=self._environment(),
        )
        for _ in range(300):
            try:
                blobd.Client(self.socket, timeout=5).version()
                return
            except blobd.BlobdError:
                time.sleep(0.05)
        raise AssertionError("the daemon does not start: " + (self.folder / "log").read_text())

    def stop(self) -> None:
        """Kills it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        """Stops it and removes what it has stored."""
        self.stop()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *arguments: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            [str(self.program), "--socket", self.socket, *arguments],
            capture_output=True,
            text=True,
            env=self._environment(),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def import_model(self, name: str, content: bytes) -> None:
        """Brings a file into the store."""
        path = self.folder / "import.gguf"
        path.write_bytes(content)
        self.command("import", "--name", name, str(path))
        path.unlink()

    def sessions(self) -> List[Dict[str, Any]]:
        """Who has what open."""
        return list(json.loads(self.command("ps", "--json"))["sessions"])

    def _environment(self) -> Dict[str, str]:
        places = {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder)}
        return {**os.environ, **places, "BLOBD_SOCKET": self.socket}


class Registry:
    """A registry with one model: what a manifest needs, over plain HTTP."""

    def __init__(self, layers: Sequence[Tuple[str, bytes]]) -> None:
        blobs = {_digest(content): content for _, content in layers}
        config = b'{"model_format":"gguf"}'
        blobs[_digest(config)] = config
        entries = [_descriptor("application/vnd.ollama.image." + kind, content) for kind, content in layers]
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": _descriptor("application/vnd.docker.container.image.v1+json", config),
            "layers": entries,
        }
        text = json.dumps(manifest).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                content = text if "/manifests/" in self.path else blobs.get(self.path.rpartition("/")[2], b"")
                status, span = 200, self.headers.get("range", "")
                if span.startswith("bytes="):
                    first, _, last = span[6:].partition("-")
                    end = int(last) + 1 if last else len(content)
                    status, whole = 206, len(content)
                    content = content[int(first) : end]
                self.send_response(status)
                if status == 206:
                    self.send_header("content-range", f"bytes {first}-{int(first) + len(content) - 1}/{whole}")
                self.send_header("content-type", "application/vnd.docker.distribution.manifest.v2+json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.reference = f"http://127.0.0.1:{self.server.server_port}/library/spoken:1b"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops it."""
        self.server.shutdown()
        self.server.server_close()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _descriptor(media_type: str, content: bytes) -> Dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: blobd-fd/1\r\n\r\n"


class FakeDaemon:
    """A socket on which a script answers one connection after another."""

    def __init__(self, script: Callable[[FakePeer], None]) -> None:
        self.folder = tempfile.mkdtemp(prefix="blobd-fake-")
        self.socket = os.path.join(self.folder, "blobd.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket)
        self._listener.listen()
        self._script = script
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    self._script(FakePeer(connection))
                except OSError:
                    pass  # The client has hung up, as it should on most of these.

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        # A plain `close` would not wake the thread that waits for connections.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # What the script has seen is complete then.
        self._thread.join(5)
        shutil.rmtree(self.folder)


class FakePeer:
    """The daemon's end of a connection, with the means to break every rule."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.request = b""
        while b"\r\n\r\n" not in self.request:
            self.request += connection.recv(65536)

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.connection.sendall(data)

    def answer(self, status: int, body: bytes) -> None:
        """An answer with a body."""
        self.send(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

    def frame(self, attached: Sequence[int] = (), /, **content: object) -> None:
        """A frame, with descriptors on its first byte."""
        text = json.dumps(content).encode()
        data = struct.pack("<I", len(text)) + text
        sent = socket.send_fds(self.connection, [data], list(attached)) if attached else 0
        if sent < len(data):
            # Sending nothing fails too once the client has all it wanted and is gone.
            self.send(data[sent:])

    def head(self, tensor_count: int, fd_count: int, layers: Optional[List[Dict[str, Any]]] = None) -> None:
        """The upgrade and the first frame; one layer if none is given."""
        self.send(UPGRADED)
        known = [layer()] if layers is None else layers
        head = {"name": "m", "digest": "sha256:" + "0" * 64, "layers": known}
        self.frame(open={**head, "tensor_count": tensor_count, "fd_count": fd_count})

    def read_frame(self) -> Any:
        """A frame of the client's; `None` when it has hung up."""
        head = self.connection.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return None
        return json.loads(self.connection.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL))

    def wait_for_close(self) -> None:
        """Holds the lease until the client ends it."""
        while self.connection.recv(4096):
            pass


def layer(**fields: Any) -> Dict[str, Any]:
    """A layer of a fake head."""
    known = {"media_type": "application/vnd.ollama.image.model", "digest": "sha256:" + "1" * 64, "size": 64}
    return {**known, "piece_count": 0, **fields}


def entry(**fields: Any) -> Dict[str, Any]:
    """A tensor of a fake table."""
    return {"name": "t", "type": "F32", "shape": [16], "layer": 0, "fd": 0, "offset": 0, "size": 64, **fields}


def temporary_file(content: bytes) -> int:
    """A descriptor of a file that is in no folder."""
    fd = os.memfd_create("blob")
    os.write(fd, content)
    return fd


def open_fds() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))
