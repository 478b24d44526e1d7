"""Completes a prompt with Ollama: `python3 ollama.py OLLAMA MODELS NAME PROMPT [MODEL.gguf]`.

MODELS is a models directory for Ollama. If a model file, or a pattern of shards, is given, a copy of it is added to the
directory first. Like every engine here, it prints `ready PID "TEXT"`, then keeps the weights loaded until its standard input ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from servers import ask, child_of, free_address, wait_for


def complete(host: str, name: str, prompt: str) -> str:
    """The completion of the prompt, greedily and without a template."""
    options = {"temperature": 0, "num_predict": 24, "num_ctx": 256, "num_thread": 1, "use_mmap": True}
    body = {"model": name, "prompt": prompt, "raw": True, "stream": False, "options": options}
    text: str = ask(f"{host}/api/generate", body)["response"]
    return text


def main() -> None:
    ollama, models, name, prompt = sys.argv[1:5]
    address = free_address()
    host = f"http://{address}"
    with tempfile.TemporaryDirectory() as home:
        settings = {"HOME": home, "OLLAMA_MODELS": models, "OLLAMA_HOST": address}
        environment = {**os.environ, **settings, "GIN_MODE": "release", "OLLAMA_NOPRUNE": "1"}
        server = subprocess.Popen(
            [ollama, "serve"], env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        try:
            wait_for(f"{host}/api/version")
            if file := sys.argv[5:]:
                modelfile = Path(home, "Modelfile")
                modelfile.write_text(f"FROM {file[0]}\n")
                command = [ollama, "create", name, "-f", str(modelfile)]
                subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
            text = complete(host, name, prompt)
            print("ready", child_of(server.pid), json.dumps(text), flush=True)
            sys.stdin.read()
        finally:
            server.terminate()
            server.wait()


main()
