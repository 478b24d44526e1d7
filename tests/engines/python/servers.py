"""Functions for the engines that are HTTP servers."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

TIMEOUT_SECONDS = 100


def free_address() -> str:
    """An address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def ask(url: str, body: object = None) -> Any:
    """The JSON response to a request: a POST request if there is a body, otherwise GET."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_SECONDS) as response:
            return json.load(response)
    except HTTPError as error:
        raise SystemExit(f"{url}: {error}: {error.read().decode(errors='replace')}") from None


def wait_for(url: str) -> None:
    """Waits until a server answers."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            build_opener(ProxyHandler({})).open(url, timeout=1).close()
            return
        except (URLError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def child_of(server: int) -> int:
    """The process with the weights: the server's child."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == server:
            return int(entry.name)
    raise SystemExit("the server has no child process with the model")
