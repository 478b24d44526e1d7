"""What the loader uses of vLLM 0.33, with the same names, signatures and order of calls, without vLLM.

vLLM itself needs gigabytes and, to run, an accelerator. These classes were written after its `base_loader.py`,
`default_loader.py`, `ep_weight_filter.py` and `__init__.py` of `vllm/model_executor/model_loader`; where vLLM is
installed, `test_vllm_loader.py` compares the two.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

PACKAGE = "vllm.model_executor.model_loader"


class LoadConfig:
    def __init__(self, load_format: str, **extra: Any) -> None:
        self.load_format = load_format
        self.model_loader_extra_config: Any = extra


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...


class DefaultModelLoader(BaseModelLoader):
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: Optional[str]
        subfolder: Optional[str] = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: Optional[List[str]] = None
        is_unused_weight: Optional[Callable[[str], bool]] = None

    counter_before_loading_weights: float = 0.0

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.local_expert_ids: Optional[Set[int]] = None
        unexpected = set(load_config.model_loader_extra_config) - {"enable_multithread_load", "num_threads"}
        if unexpected:
            raise ValueError(f"Unexpected extra config keys: {unexpected}")

    def _get_weights_iterator(self, source: Source) -> Iterator[Tuple[str, Any]]:
        raise AssertionError("the loader must replace this")

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[Tuple[str, Any]]:
        yield from self._get_weights_iterator(
            DefaultModelLoader.Source(
                model_config.model,
                model_config.revision,
                prefix="",
                allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
                is_unused_weight=getattr(model, "is_unused_checkpoint_weight", None),
            )
        )
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def download_model(self, model_config: Any) -> None:
        raise AssertionError("the loader must replace this")

    def load_weights(self, model: Any, model_config: Any) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = {name for name, _ in model.named_parameters()} - loaded
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")


def should_skip_weight(weight_name: str, local_expert_ids: Optional[Set[int]]) -> bool:
    expert = re.search(r"\.experts\.([0-9]+)\.", weight_name)
    return bool(local_expert_ids and expert and int(expert[1]) not in local_expert_ids)


def install() -> Dict[str, type]:
    """Replaces the modules of vLLM by stand-ins. Returns the registered loaders, by load format."""
    loaders: Dict[str, type] = {}

    def register_model_loader(load_format: str) -> Callable[[type], type]:
        def register(loader: type) -> type:
            if not issubclass(loader, BaseModelLoader):
                raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
            loaders[load_format] = loader
            return loader

        return register

    for name in ("vllm", "vllm.model_executor", PACKAGE, f"{PACKAGE}.ep_weight_filter"):
        sys.modules[name] = types.ModuleType(name)
    package: Any = sys.modules[PACKAGE]
    package.DefaultModelLoader = DefaultModelLoader
    package.register_model_loader = register_model_loader
    experts: Any = sys.modules[f"{PACKAGE}.ep_weight_filter"]
    experts.should_skip_weight = should_skip_weight
    return loaders


def remove() -> None:
    """Takes the modules away again."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
