"""A model loader for vLLM: `vllm serve FOLDER --load-format blobd`.

vLLM calls `register` through the entry point group `vllm.general_plugins`; nothing is imported from vLLM before that.
The loader is vLLM's own default loader with another source of tensors: views of the page cache from `safe_open`, which
vLLM copies into the parameters of its model.

vLLM reads the configuration and the tokenizer itself, from a folder: the model's in the mount (`MOUNT/NAME/TAG`)
or under `blobd exec` (`/blobd/REF`), from which the loader tells the reference. With another folder, give the
reference in
`--model-loader-extra-config '{"reference": "REF"}'`, or in Python as `LLM(..., model_weights="blobd://REF")`.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import os
import re
import time
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from ._safe_open import SafeOpen, choose_elements
from .client import Client
from .errors import WeightsError
from .model import OpenModel

LOAD_FORMAT = "blobd"
"""The name of the loader: `--load-format blobd`."""

_SCHEME = "blobd://"
_EXEC_ROOT = "/blobd/"
_MOUNT_SOURCE = "blobd"
# The first is of mounts that root has made.
_MOUNT_TYPES = ("fuse", "fuse.blobd")
_INDEX = "model.safetensors.index.json"
_EXTRA_KEY = "reference"
# Folders of a mount that are not names of models.
_OTHER_TREES = ("hub", "lmstudio", "models", "ollama")


def register() -> None:
    """Registers the loader with the vLLM that calls this; may be called again."""
    from vllm.model_executor.model_loader import register_model_loader

    global _registered
    if not _registered:
        register_model_loader(LOAD_FORMAT)(_loader_class())
        _registered = True


_registered = False


def reference_of(model: str) -> str:
    """The reference in `model_weights`, `blobd://REF`, or in `model`: a folder under `/blobd`, or in a mount of blobd.

    Raises `ValueError` for any other.
    """
    if model.startswith(_SCHEME):
        return model[len(_SCHEME) :]
    path = os.path.abspath(model)
    if path.startswith(_EXEC_ROOT):
        return path[len(_EXEC_ROOT) :]
    for mount in _mounts():
        parts = os.path.relpath(path, mount).split(os.sep)
        if parts[0] != os.pardir and len(parts) > 1 and parts[0] not in _OTHER_TREES:
            return f"{'/'.join(parts[:-1])}:{parts[-1]}"
    raise ValueError(
        f"model: expected MOUNT/NAME/TAG, /blobd/REF or {_SCHEME}REF for load format {LOAD_FORMAT}, found {model!r}; "
        f"""or give the reference: --model-loader-extra-config '{{"{_EXTRA_KEY}": "REF"}}'"""
    )


def weight_files(model: OpenModel, folder: str = "", patterns: Optional[List[str]] = None) -> List[str]:
    """The safetensors files that vLLM would load from the model's folder, in the order of their numbers.

    `patterns` replaces vLLM's own choice: the files in the index, or all but Mistral's copies of the same weights.
    """
    prefix = f"{folder}/" if folder else ""
    names = [layer.name or "" for layer in model.layers if layer.format == "safetensors"]
    names = [name for name in names if name.startswith(prefix) and "/" not in name[len(prefix) :]]
    if patterns is not None:
        names = [name for name in names if any(fnmatch.fnmatch(name[len(prefix) :], each) for each in patterns)]
    else:
        indexed = {prefix + path for path in _index(model, prefix + _INDEX)}
        own = [name for name in names if not name[len(prefix) :].startswith("consolidated")]
        names = [name for name in names if name in indexed] if indexed else own or names
    if not names:
        where = f"folder {folder!r} of model" if folder else "model"
        advice = f"`blobd show {model.name}` lists its files"
        raise WeightsError(f"{where} {model.name}: no safetensors file; {advice}", "not_found")
    return sorted(names, key=_numbers_as_numbers)


def _numbers_as_numbers(name: str) -> List[Tuple[int, str]]:
    """For sorting: `9` before `10`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split("([0-9]+)", name)]


def _index(model: OpenModel, path: str) -> List[str]:
    """The files that the index names, or an empty list if there is no index."""
    for number, layer in enumerate(model.layers):
        if layer.name == path and layer.format is None:
            try:
                files: Mapping[str, str] = json.loads(bytes(model.layer_bytes(number)))["weight_map"]
                return list(files.values())
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise WeightsError(f"file {path!r}: no index of weights: {error}; run `blobd verify`") from None
    return []


def _tensors(reference: str, source: Any) -> Iterator[Tuple[str, Any]]:
    """The tensors of a source: a reference and what vLLM's `DefaultModelLoader.Source` says about the files."""
    elements = choose_elements("pt", "cpu")
    is_unused = getattr(source, "is_unused_weight", None)
    with Client().open(reference) as model:
        for path in weight_files(model, source.subfolder or "", source.allow_patterns_overrides):
            opened = SafeOpen(model, elements, path)
            for name in opened.offset_keys():
                if is_unused is None or not is_unused(name):
                    yield name, opened.get_tensor(name)


def _mounts() -> List[str]:
    """Where blobd is mounted, the deepest first."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        fields = [line.split() for line in mounts]
    # The kernel writes spaces and the like as three octal digits.
    paths = [
        re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), each[1])
        for each in fields
        if len(each) > 2 and each[0] == _MOUNT_SOURCE and each[2] in _MOUNT_TYPES
    ]
    return sorted(paths, key=len, reverse=True)


def _loader_class() -> Any:
    from vllm.model_executor.model_loader import DefaultModelLoader

    # Without it, the default loader would look for the weights elsewhere.
    if not hasattr(DefaultModelLoader, "_get_weights_iterator"):
        raise RuntimeError(
            "vLLM: expected a DefaultModelLoader with _get_weights_iterator, as in 0.33, found none; update blobd, "
            "or use --load-format safetensors on the mount"
        )

    class BlobdModelLoader(DefaultModelLoader):  # type: ignore[misc, unused-ignore]
        """Loads the weights of a model from the blobd daemon of this machine."""

        counter_before_loading_weights: float = 0.0

        def __init__(self, load_config: Any) -> None:
            own = copy.copy(load_config)
            extra = dict(load_config.model_loader_extra_config or {})
            self._reference: Optional[str] = extra.pop(_EXTRA_KEY, None)
            own.model_loader_extra_config = extra
            super().__init__(own)
            # The model in the configuration, and the reference from which its weights come.
            self._primary = ("", "")

        def download_model(self, model_config: Any) -> None:
            """Checks that the model is stored; `blobd pull` downloads."""
            Client().model(self._reference_of(model_config))

        def load_weights(self, model: Any, model_config: Any) -> None:
            self._primary = (model_config.model, self._reference_of(model_config))
            if getattr(model_config, "quantization", None) == "torchao":
                raise ValueError(
                    f"quantization: expected one that is not torchao for load format {LOAD_FORMAT}, found torchao; "
                    "use --load-format safetensors on the mount"
                )
            super().load_weights(model, model_config)

        def _get_weights_iterator(self, source: Any) -> Iterator[Tuple[str, Any]]:
            path, primary = self._primary
            reference = primary if source.model_or_path == path else reference_of(source.model_or_path)
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            for name, tensor in _tensors(reference, source):
                if not self._is_of_another_rank(name):
                    yield source.prefix + name, tensor

        def _reference_of(self, model_config: Any) -> str:
            weights: str = getattr(model_config, "model_weights", "") or model_config.model
            return self._reference or reference_of(weights)

        def _is_of_another_rank(self, name: str) -> bool:
            """Whether vLLM's filter for expert parallelism leaves the tensor out."""
            if getattr(self, "local_expert_ids", None) is None:
                return False
            from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

            return bool(should_skip_weight(name, self.local_expert_ids))

    return BlobdModelLoader
