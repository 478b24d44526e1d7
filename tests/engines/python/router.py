"""Completes a prompt with llama.cpp's router: `python3 router.py LLAMA-SERVER DIR MODELS NAME PROMPT`.

For the directory DIR, the router must list exactly the models MODELS, separated by commas. NAME is the one that it loads.
Like every engine here, it prints `ready PID "TEXT"`, then keeps the weights loaded until its standard input ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from servers import ask, child_of, free_address, wait_for

OPTIONS = ("--threads", "1", "--ctx-size", "256", "--parallel", "1", "--no-repack", "--load-mode", "mmap", "--no-warmup")


def main() -> None:
    program, folder, models, name, prompt = sys.argv[1:6]
    address = free_address()
    host, port = f"http://{address}", address.rpartition(":")[2]
    with tempfile.TemporaryDirectory() as home:
        # It also lists the models in the user's cache.
        environment = {**os.environ, "HOME": home, "LLAMA_CACHE": home, "HF_HUB_CACHE": home}
        command = [program, "--models-dir", folder, "--host", "127.0.0.1", "--port", port, *OPTIONS]
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            wait_for(f"{host}/health")
            listed = {model["id"] for model in ask(f"{host}/v1/models")["data"]}
            if listed != set(models.split(",")):
                raise SystemExit(f"router.py: models of {folder}: expected {models}, found {sorted(listed)}")
            body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0}
            text = ask(f"{host}/v1/completions", body)["choices"][0]["text"]
            print("ready", child_of(server.pid), json.dumps(text), flush=True)
            sys.stdin.read()
        finally:
            server.terminate()
            server.wait()


main()
