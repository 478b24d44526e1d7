"""Bytes, frames and descriptors on a connection to the daemon.

Everything is received with `recvmsg`, from the first byte of a response on: after an upgrade, frames
with descriptors follow its head immediately, and a plain `recv` would lose them without an error.
Unused descriptors are closed with the connection. Frames, lines and waiting descriptors have limits,
so that a daemon cannot fill this process's memory.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import List, Tuple

from ._responses import Fields, as_object, read_error
from .errors import BlobdError, ClosedError, ConnectionFailedError, FdsLostError, ProtocolError, TimedOutError

MAX_FRAME_BYTES = 1 << 20
"""The longest JSON of a frame."""
MAX_FDS_PER_BATCH = 64
"""The most descriptors attached to one frame, and unacknowledged."""

# The buffer of one system call: the tables of an ordinary model need one or two.
_RECEIVE_BYTES = 64 << 10
_ANCILLARY_BYTES = socket.CMSG_LEN(MAX_FDS_PER_BATCH * array.array("i").itemsize)


class Wire:
    """A connected socket with its received but unread bytes and descriptors."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._bytes = bytearray()
        self._fds: List[int] = []

    def send(self, data: bytes) -> None:
        """Sends all of `data`."""
        try:
            self._stream.sendall(data)
        except BrokenPipeError:
            # A daemon that refuses early also closes early; its response can still be read.
            pass
        except OSError as error:
            raise _failure(error) from error

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        while len(self._bytes) < length:
            self._receive()
        return self._cut(length)

    def take_through(self, end: bytes, limit: int, what: str) -> bytes:
        """The next bytes up to and including `end`, at most `limit`; `what` names them in errors."""
        searched = 0
        while True:
            found = self._bytes.find(end, searched, limit)
            if found >= 0:
                return self._cut(found + len(end))
            if len(self._bytes) >= limit:
                raise ProtocolError(f"response's {what} is longer than the {limit} bytes allowed")
            searched = max(0, len(self._bytes) - len(end) + 1)
            self._receive()

    def frame(self) -> Tuple[str, object]:
        """The kind and the content of the next frame; raises the error of an error frame."""
        (length,) = struct.unpack("<I", self.take(4))
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {length} bytes announced, at most {MAX_FRAME_BYTES} allowed")
        frame = as_object(parse_json(self.take(length), "frame"), "frame")
        if len(frame) != 1:
            raise ProtocolError(f"keys of a frame: expected 1, found {len(frame)}")
        ((kind, content),) = frame.items()
        if kind == "error":
            raise read_error(content)
        return kind, content

    def expect(self, kind: str) -> object:
        """The content of the next frame, which must be of this kind."""
        found, content = self.frame()
        if found != kind:
            raise ProtocolError(f"frame: expected {kind!r}, found {found!r}")
        return content

    def batch(self, received: int, fd_count: int) -> List[int]:
        """Receives and acknowledges the next descriptors. The caller owns them from then on."""
        fields = Fields("fds", self.expect("fds"))
        first, count = fields.number("first"), fields.number("count")
        if first != received or not 0 < count <= min(fd_count - received, MAX_FDS_PER_BATCH):
            raise ProtocolError(f"descriptors {first}+{count} received after {received} of {fd_count}")
        if len(self._fds) != count:
            raise ProtocolError(f"{len(self._fds)} descriptors received with a frame that announces {count}")
        ack = json.dumps({"ack": {"received": received + count}}).encode()
        self.send(struct.pack("<I", len(ack)) + ack)
        fds, self._fds = self._fds, []
        return fds

    def detach(self) -> socket.socket:
        """The socket alone, which is the lease; unexpected descriptors are closed."""
        close_all(self._fds)
        self._fds = []
        return self._stream

    def close(self) -> None:
        """Closes the connection and the unused descriptors."""
        close_all(self._fds)
        self._fds = []
        self._stream.close()

    def _cut(self, length: int) -> bytes:
        taken = bytes(self._bytes[:length])
        del self._bytes[:length]
        return taken

    def _receive(self) -> None:
        try:
            data, ancillary, flags, _ = self._stream.recvmsg(
                _RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise _failure(error) from error
        self._fds.extend(_fds_in(ancillary))
        if flags & socket.MSG_CTRUNC:
            raise FdsLostError()
        if len(self._fds) > MAX_FDS_PER_BATCH:
            raise ProtocolError(f"more than {MAX_FDS_PER_BATCH} descriptors received unacknowledged")
        if not data:
            raise ClosedError()
        self._bytes += data


def _fds_in(ancillary: List[Tuple[int, int, bytes]]) -> List[int]:
    # Not `socket.recv_fds`: it ignores its flags (as of Python 3.13), and with them close-on-exec.
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def parse_json(text: bytes, what: str) -> object:
    """Parses JSON in UTF-8; `what` names it in errors."""
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProtocolError(f"{what} is not the JSON expected: {reason}") from None
    return parsed


def close_all(fds: List[int]) -> None:
    """Closes these descriptors."""
    for fd in fds:
        os.close(fd)


def _failure(error: OSError) -> BlobdError:
    if isinstance(error, socket.timeout):
        return TimedOutError()
    if isinstance(error, ConnectionResetError):
        return ClosedError()
    return ConnectionFailedError(f"blobd daemon: connection failed: {error}; try again")
