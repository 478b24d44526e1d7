"""The layers of a model, by the names of its tensors. The rules are those of Ollama."""

from __future__ import annotations

import re
from typing import Dict, Iterable, Optional, Tuple

from ._responses import Tensor


def group_layers(tensors: Iterable[Tensor]) -> Dict[str, Dict[str, Tensor]]:
    """The tensors by the name of their layer, such as `blk.0`, and by their name in it, such as
    `attn_q.weight`; sorted. See `split_name`."""
    layers: Dict[str, Dict[str, Tensor]] = {}
    for tensor in tensors:
        layer, name = split_name(tensor.name)
        layers.setdefault(layer, {})[name] = tensor
    return {layer: dict(sorted(layers[layer].items())) for layer in sorted(layers)}


def split_name(name: str) -> Tuple[str, str]:
    """The name of a tensor's layer, and the tensor's name in the layer: `blk.0` and `attn_q.weight`,
    `token_embd` and `weight`.

    The name is split at its dots. If one of the parts is `blk` or `mm` and at least two follow, the layer's
    name ends with the part after it. Otherwise it is the first part.
    """
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part in ("blk", "mm")), len(parts))
    end = place + 2 if place + 2 < len(parts) else 1
    return ".".join(parts[:end]), ".".join(parts[end:])


def block_number(name: str) -> Optional[int]:
    """The number of the block to which a tensor belongs: 31 of `blk.31.attn_q.weight`. `None` for a tensor
    outside the blocks, and for the blocks of a vision tower."""
    block = re.match(r"blk\.0*([0-9]{1,20})\.", name)
    return int(block[1]) if block and int(block[1]) < 1 << 64 else None
