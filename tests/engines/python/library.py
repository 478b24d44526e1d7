"""Runs a model in a folder with a Python library: `library.py LIBRARY FOLDER`.

LIBRARY is `transformers`, `diffusers`, `mlx` or `safetensors`; the last two read all tensors. Like every engine here, it
prints `ready PID "TEXT"`, here with a digest of the outputs, then keeps the weights loaded until its standard input ends;
if the library is not installed or does not support the folder, it prints `cannot REASON`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
from typing import Any, Iterator, Tuple

os.environ["HF_HUB_OFFLINE"] = "1"


def transformers(folder: pathlib.Path) -> Tuple[Any, bytes]:
    """The last hidden state for a few tokens."""
    needs(folder / "config.json")
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        output = model(input_ids=torch.arange(1, 17).reshape(2, 8))
    return model, output.last_hidden_state.float().numpy().tobytes()


def diffusers(folder: pathlib.Path) -> Tuple[Any, bytes]:
    """A small image after two steps."""
    needs(folder / "model_index.json")
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(1)
    settings = {"num_inference_steps": 2, "generator": seed, "output_type": "np", "height": 64, "width": 64}
    return pipeline, pipeline("a cat", **settings).images.tobytes()


def mlx(folder: pathlib.Path) -> Tuple[Any, bytes]:
    """All tensors, as mlx reads them."""
    import mlx.core

    read = {file: mlx.core.load(str(file)) for file in weights(folder)}
    tensors = ((name, read[file][name]) for file in read for name in sorted(read[file]))
    return read, digest((name, memoryview(tensor.astype(mlx.core.float32)).tobytes()) for name, tensor in tensors)


def safetensors(folder: pathlib.Path) -> Tuple[Any, bytes]:
    """All tensors, as PyTorch sees them."""
    import torch
    from safetensors.torch import load_file

    read = {file: load_file(file) for file in weights(folder)}
    tensors = ((name, read[file][name]) for file in read for name in sorted(read[file]))
    return read, digest((name, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in tensors)


def weights(folder: pathlib.Path) -> list:
    return sorted(folder.rglob("*.safetensors"))


def digest(parts: Iterator[Tuple[str, bytes]]) -> bytes:
    total = hashlib.sha256()
    for name, content in parts:
        total.update(name.encode() + b"\0" + content)
    return total.digest()


def needs(file: pathlib.Path) -> None:
    if not file.is_file():
        raise ImportError(f"the model has no {file.name}")


def main() -> None:
    library, folder = sys.argv[1:]
    run = {each.__name__: each for each in (transformers, diffusers, mlx, safetensors)}[library]
    try:
        held, output = run(pathlib.Path(folder))
    except ImportError as error:
        print("cannot", error, flush=True)
        return
    print("ready", os.getpid(), json.dumps(hashlib.sha256(output).hexdigest()[:16]), flush=True)
    sys.stdin.read()
    del held


main()
