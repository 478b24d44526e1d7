"""Completes a prompt with Ollama: `python3 complete.py OLLAMA MODELS NAME PROMPT [MODEL.gguf]`.

MODELS is a models directory for Ollama. With a model file, the directory is created with a copy of it. Like every
engine here, it prints `ready PID "TEXT"`, then keeps the weights loaded until its standard input ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

TIMEOUT_SECONDS = 100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def complete(host: str, name: str, prompt: str) -> str:
    """The completion of the prompt, greedily and without a template."""
    options = {"temperature": 0, "num_predict": 24, "num_ctx": 256, "num_thread": 1, "use_mmap": True}
    body = {"model": name, "prompt": prompt, "raw": True, "stream": False, "options": options}
    request = Request(f"http://{host}/api/generate", json.dumps(body).encode())
    with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_SECONDS) as response:
        text: str = json.load(response)["response"]
        return text


def wait_for(host: str) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            build_opener(ProxyHandler({})).open(f"http://{host}/api/version", timeout=1).close()
            return
        except (URLError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def runner_of(server: int) -> int:
    """The process with the weights: the server's child."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == server:
            return int(entry.name)
    raise SystemExit("ollama has no runner")


def main() -> None:
    ollama, models, name, prompt = sys.argv[1:5]
    host = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as home:
        places = {"HOME": home, "OLLAMA_MODELS": models, "OLLAMA_HOST": host}
        environment = {**os.environ, **places, "GIN_MODE": "release"}
        server = subprocess.Popen(
            [ollama, "serve"], env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        try:
            wait_for(host)
            if file := sys.argv[5:]:
                recipe = Path(home, "Modelfile")
                recipe.write_text(f"FROM {file[0]}\n")
                command = [ollama, "create", name, "-f", str(recipe)]
                subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
            text = complete(host, name, prompt)
            print("ready", runner_of(server.pid), json.dumps(text), flush=True)
            sys.stdin.read()
        finally:
            server.terminate()
            server.wait()


main()
