"""Tensors that are read into memory in the background, as `safetensors.safe_open(...).prefetch` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

from ._memory import will_need
from ._slices import TensorSlice
from .errors import NoTensorError, SliceError

if TYPE_CHECKING:
    from types import TracebackType

PrefetchPlan = Mapping[str, Optional[slice]]
"""Names of tensors, each with `None` for all of it or a slice of its first dimension with a step of 1."""


def planned(plan: Union[PrefetchPlan, Iterable[str]]) -> PrefetchPlan:
    """The plan as a mapping: names alone stand for whole tensors."""
    if isinstance(plan, Mapping):
        return plan
    if isinstance(plan, str):
        raise TypeError(f"plan: expected names or a mapping, found the name {plan!r}; put it into a list")
    return dict.fromkeys(plan)


class PrefetchLoader:
    """The planned tensors. Each is returned once, either by `take` or by iterating over `(name, tensor)`."""

    def __init__(self, planned: Mapping[str, Tuple[TensorSlice, Optional[slice]]]) -> None:
        for name, (whole, part) in planned.items():
            if part is not None and (not whole.get_shape() or part.step not in (None, 1)):
                raise SliceError(
                    f"tensor {name!r}: plan: expected None or a slice of its first dimension with a step of 1, "
                    f"found {part} for shape {whole.get_shape()}; plan the whole tensor"
                )
        self._left: Dict[str, Tuple[TensorSlice, Optional[slice]]] = dict(planned)
        self._names = list(planned)
        for whole, part in planned.values():
            will_need(whole.bytes_of(part))

    def names(self) -> List[str]:
        """The names of all planned tensors."""
        return list(self._names)

    def take(self, name: str) -> Any:
        """The tensor with this name, or its planned part. Bytes that are not in memory yet are read on access."""
        try:
            whole, part = self._left.pop(name)
        except KeyError:
            problem = "taken before, and each is given once" if name in self._names else "not in the plan"
            raise NoTensorError(f"tensor {name!r}: {problem}; plan it in another prefetch()") from None
        return whole[...] if part is None else whole[part]

    def close(self) -> None:
        """Drops the tensors that were not taken."""
        self._left.clear()

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Tuple[str, Any]]:
        for name in list(self._left):
            yield name, self.take(name)

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()
