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

from typing import Any, Dict, Iterable, List, Optional, Union

from ._prefetch import PrefetchLoader
from ._responses import Layer, Tensor
from ._safe_open import SafeOpen, TensorMeta
from ._slices import TensorSlice
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
    DtypeError,
    FdsLostError,
    GgufError,
    MapError,
    ModelError,
    NoFileError,
    NoTensorError,
    NotFoundError,
    NotRunningError,
    ProtocolError,
    SafetensorsError,
    SessionClosedError,
    ShortError,
    SliceError,
    TimedOutError,
    UnavailableError,
    WeightsError,
)
from .layers import block_number, group_layers, split_name
from .metadata import Metadata, Range
from .model import OpenModel
from .types import Experts, FitReport, ModelDetails, ModelSummary, Version
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
    "DtypeError",
    "Experts",
    "FdsLostError",
    "FitReport",
    "GgufError",
    "Layer",
    "ManifestWeights",
    "MapError",
    "Metadata",
    "ModelDetails",
    "ModelError",
    "ModelSummary",
    "NoFileError",
    "NoTensorError",
    "NotFoundError",
    "NotRunningError",
    "OpenModel",
    "PrefetchLoader",
    "ProtocolError",
    "Quantization",
    "Range",
    "SafeOpen",
    "SafetensorsError",
    "SessionClosedError",
    "ShortError",
    "SliceError",
    "Tensor",
    "TensorMeta",
    "TensorSlice",
    "TimedOutError",
    "UnavailableError",
    "Version",
    "Weight",
    "WeightsError",
    "block_number",
    "default_sockets",
    "group_layers",
    "load_file",
    "models",
    "open",
    "safe_open",
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


def safe_open(
    reference: str, framework: str, device: Union[str, int] = "cpu", *, file: Optional[str] = None
) -> SafeOpen:
    """Opens a model of safetensors files at the default daemon; see `Client.safe_open`."""
    return Client().safe_open(reference, framework, device, file=file)


def load_file(
    reference: str, device: Union[str, int] = "cpu", *, framework: str = "pt", file: Optional[str] = None
) -> Dict[str, Any]:
    """All tensors of a model of safetensors files at the default daemon; see `Client.load_file`."""
    return Client().load_file(reference, device, framework=framework, file=file)


def models() -> List[ModelSummary]:
    """The models of the default daemon."""
    return Client().models()


def version() -> Version:
    """The version and store of the default daemon."""
    return Client().version()
