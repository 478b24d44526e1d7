"""The part of HTTP/1.1 that a client of the daemon needs: one request on one connection."""

from __future__ import annotations

import json
from typing import Dict, Mapping, Optional

from ._responses import Fields, read_error
from ._wire import Wire, parse_json
from .errors import ProtocolError

MAX_HEAD_BYTES = 16 << 10
"""The longest response head that is read."""
MAX_BODY_BYTES = 256 << 20
"""The longest body that is read: details of a model with 131,072 tensors are below it."""
# The longest line that introduces a chunk.
_MAX_LINE_BYTES = 1024

UPGRADE = "blobd-fd/1"
"""The protocol that `open` upgrades to."""


def query(wire: Wire, path: str, request_id: str) -> object:
    """The body of the response to `GET path`, parsed."""
    head = f"GET {path} HTTP/1.1\r\nhost: blobd\r\nconnection: close\r\nx-request-id: {request_id}\r\n\r\n"
    wire.send(head.encode())
    return parse_json(_expect_status(wire, 200), "response")


def upgrade(wire: Wire, path: str, params: Mapping[str, object], request_id: str) -> None:
    """Sends `POST path` and reads the response's head; from then on the connection carries frames."""
    body = json.dumps(params).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: blobd\r\nconnection: upgrade\r\nupgrade: {UPGRADE}\r\n"
        f"x-request-id: {request_id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    wire.send(head.encode() + body)
    _expect_status(wire, 101)


def _expect_status(wire: Wire, expected: int) -> bytes:
    """Returns the body of a response with this status; for another status, raises the daemon's error."""
    lines = wire.take_through(b"\r\n\r\n", MAX_HEAD_BYTES, "head").decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not _is_number(words[1]):
        raise ProtocolError("response is not HTTP")
    status = int(words[1])
    if status == expected == 101:
        return b""
    body = _body(wire, _headers(lines[1:]))
    if status == expected:
        return body
    raise _error_in(body) or ProtocolError(f"status of the response: expected {expected}, found {status}")


def _headers(lines: list[str]) -> Dict[str, str]:
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


def _error_in(body: bytes) -> Optional[Exception]:
    try:
        envelope = Fields("response", parse_json(body, "response")).object("error")
        return None if envelope is None else read_error(envelope)
    except ProtocolError:
        return None


def _body(wire: Wire, headers: Mapping[str, str]) -> bytes:
    encoding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if encoding == "chunked":
        return _chunks(wire)
    if encoding is not None or length is None or not _is_number(length):
        raise ProtocolError("response is not HTTP: neither content-length nor chunks")
    return _bounded(wire, int(length), 0)


def _chunks(wire: Wire) -> bytes:
    body = bytearray()
    while True:
        line = wire.take_through(b"\r\n", _MAX_LINE_BYTES, "chunk line").partition(b";")[0].strip()
        try:
            length = int(line, 16) if not line.startswith((b"-", b"+")) else -1
        except ValueError:
            length = -1
        if length < 0:
            raise ProtocolError("response's chunks are malformed")
        if length == 0:
            return bytes(body)  # Trailers are not read: the connection is closed after this.
        body += _bounded(wire, length, len(body))
        if wire.take(2) != b"\r\n":
            raise ProtocolError("response's chunks are malformed")


def _bounded(wire: Wire, length: int, before: int) -> bytes:
    if before + length > MAX_BODY_BYTES:
        raise ProtocolError(f"response's body is longer than the {MAX_BODY_BYTES} bytes allowed")
    return wire.take(length)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19
