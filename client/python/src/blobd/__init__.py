"""Open a model from a blobd daemon and map its tensors without a copy.

    import blobd

    with blobd.open("llama3:8b") as model:
        weights = model["blk.0.attn_q.weight"]      # a read-only memoryview of the page cache
        print(model.tensor("blk.0.attn_q.weight").type, bytes(weights[:8]))
        print(model.text("template"))

A model is in use until it is closed. Mappings stay valid after that, when the daemon stops and when
the model is removed. The package needs only the standard library, starts no thread and keeps no
global state.
"""

from __future__ import annotations

from typing import Iterable, List, Optional

from ._responses import Experts, Layer, ModelSummary, Tensor, Version
from ._sockets import default_sockets
from ._tensor_layers import Quantization, Weight
from .client import Client
from .contiguous import ContiguousGguf
from .errors import (
    BlobdError,
    BusyError,
    ClosedError,
    ConnectError,
    ConnectionFailedError,
    CorruptError,
    DaemonError,
    DeniedError,
    FdsLostError,
    GgufError,
    MapError,
    ModelError,
    NoTensorError,
    NotFoundError,
    NotRunningError,
    ProtocolError,
    SafetensorsError,
    SessionClosedError,
    ShortError,
    TimedOutError,
    UnavailableError,
    WeightsError,
)
from .layers import block_number, group_layers, split_name
from .metadata import Metadata, Range
from .model import OpenModel
from .weights import ManifestWeights

__version__ = "0.1.0"

__all__ = [
    "BlobdError",
    "BusyError",
    "Client",
    "ClosedError",
    "ConnectError",
    "ConnectionFailedError",
    "ContiguousGguf",
    "CorruptError",
    "DaemonError",
    "DeniedError",
    "Experts",
    "FdsLostError",
    "GgufError",
    "Layer",
    "ManifestWeights",
    "MapError",
    "Metadata",
    "ModelError",
    "ModelSummary",
    "NoTensorError",
    "NotFoundError",
    "NotRunningError",
    "OpenModel",
    "ProtocolError",
    "Quantization",
    "Range",
    "SafetensorsError",
    "SessionClosedError",
    "ShortError",
    "Tensor",
    "TimedOutError",
    "UnavailableError",
    "Version",
    "Weight",
    "WeightsError",
    "block_number",
    "default_sockets",
    "group_layers",
    "models",
    "open",
    "split_name",
    "version",
]


def open(
    reference: str,
    *,
    component: Optional[str] = None,
    prefix: Optional[str] = None,
    names: Optional[Iterable[str]] = None,
) -> OpenModel:
    """Opens a model at the default daemon; see `Client.open`."""
    return Client().open(reference, component=component, prefix=prefix, names=names)


def models() -> List[ModelSummary]:
    """The models of the default daemon."""
    return Client().models()


def version() -> Version:
    """The version and store of the default daemon."""
    return Client().version()
