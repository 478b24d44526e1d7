"""Reads every page of a model of safetensors files: `safe_open.py MODEL numpy|pt`.

MODEL is a reference, or a folder, which the `safetensors` library opens. Like every engine here, it prints
`ready PID "TEXT"`, then keeps the weights loaded until its standard input ends; if the library is not installed, it
prints `cannot REASON`.
"""

import json
import os
import pathlib
import sys
import warnings

import blobd


def tensors(model: str, framework: str) -> dict:
    if not os.path.isdir(model):
        return blobd.load_file(model, framework=framework)
    import safetensors

    files = sorted(pathlib.Path(model).rglob("*.safetensors"))
    opened = {file: safetensors.safe_open(file, framework) for file in files}
    return {(file, key): value for file in files for key, value in opened[file].get_tensors().items()}


def total(tensor: object, framework: str) -> int:
    """The sum of all bytes, which reads all pages."""
    if framework == "numpy":
        return int(tensor.reshape(-1).view("u1").sum()) if tensor.size else 0
    import torch

    return int(tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) if tensor.numel() else 0


def main() -> None:
    model, framework = sys.argv[1:]
    # PyTorch warns because it has no read-only tensors.
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    try:
        loaded = tensors(model, framework)
    except (ImportError, blobd.DtypeError, blobd.ModelError) as error:
        print("cannot", error, flush=True)
        return
    text = f"{len(loaded)} tensors, {sum(total(tensor, framework) for tensor in loaded.values()):x}"
    print("ready", os.getpid(), json.dumps(text), flush=True)
    sys.stdin.read()


main()
