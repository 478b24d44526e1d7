"""The client: one method per verb.

Every request makes its own connection and none is kept between requests, so threads can share a
`Client`, and it stays valid after a restart of the daemon: open the model again then.
"""

from __future__ import annotations

import os
import socket as sockets
from typing import Any, Dict, Iterable, List, Optional, Union, cast
from urllib.parse import quote, urlencode

from ._http import query, upgrade
from ._request_ids import RequestIds
from ._responses import as_object, read_models, read_version
from ._safe_open import SafeOpen, choose_elements, folder_of
from ._sockets import SYSTEM_SOCKET, check_before_connecting, default_sockets, evidence_of_service, hint
from ._wire import Wire
from .errors import BlobdError, ConnectError, NotFoundError, NotRunningError, UnavailableError
from .model import OpenModel, receive
from .types import FitReport, ModelDetails, ModelSummary, Version
from .weights import ManifestWeights

SOCKET_VARIABLE = "BLOBD_SOCKET"
"""The environment variable that names the socket."""

Path = Union[str, "os.PathLike[str]"]


class Client:
    """Sends requests to a daemon.

    `socket` is the daemon's socket; without it, the one that `BLOBD_SOCKET` names, or else the system's,
    or else the first of this user's that accepts a connection. On a machine with a daemon for all users, a
    request fails while that daemon does not accept connections of this user. `timeout` is how many seconds to wait for the
    daemon to take or send the next bytes; without it, there is no limit.

    `request_prefix` starts the ID of each request, such as the ID of a job in the program's own log; a
    point and a number follow. The daemon's log and its audit log have these IDs. It has 1 to 43
    letters, digits, `.`, `-` and `_`; without it, the client chooses random digits.
    """

    def __init__(
        self,
        socket: Optional[Path] = None,
        *,
        timeout: Optional[float] = None,
        request_prefix: Optional[str] = None,
    ) -> None:
        self._socket = None if socket is None else os.fspath(socket)
        self._timeout = timeout
        self._ids = RequestIds(request_prefix)

    def version(self) -> Version:
        """The daemon's version and the store that it serves."""
        return read_version(self._query("/v1/version"))

    def models(self) -> List[ModelSummary]:
        """All models, sorted by name."""
        return read_models(self._query("/v1/models"))

    def model(self, reference: str) -> ModelDetails:
        """One model in full, as the protocol describes it: metadata, layers, tensors with digests.

        Raises `NotFoundError` if there is no model with this name.
        """
        details = as_object(self._query("/v1/models/" + quote(reference, safe="/:@")), "response")
        return cast("ModelDetails", details)

    def fit(
        self,
        reference: str,
        *,
        context: Optional[int] = None,
        batch: Optional[int] = None,
        parallel: Optional[int] = None,
        cache_type_k: Optional[str] = None,
        cache_type_v: Optional[str] = None,
        vram_bytes: Iterable[int] = (),
        memory_bytes: Optional[int] = None,
        cpu_moe: bool = False,
        basis: Optional[str] = None,
    ) -> FitReport:
        """The memory that a model needs, as `blobd fit --json` prints it; opens and loads nothing.

        `vram_bytes` is the memory of each device that the model may take, `memory_bytes` the machine's.
        Without both, the answer has no `fits`, `layers` and `max_context`. `context` 0 is the one that the model
        was trained for; what is not given has the command's default.
        """
        settings: Dict[str, object] = {
            "context": context,
            "batch": batch,
            "parallel": parallel,
            "cache_type_k": cache_type_k,
            "cache_type_v": cache_type_v,
            "memory_bytes": memory_bytes,
            "cpu_moe": "true" if cpu_moe else None,
            "basis": basis,
        }
        pairs = [(key, value) for key, value in settings.items() if value is not None]
        pairs += [("vram_bytes", size) for size in vram_bytes]
        path = f"/v1/fit/{quote(reference, safe='/:@')}?{urlencode(pairs)}"
        return cast("FitReport", as_object(self._query(path), "response"))

    def open(
        self,
        reference: str,
        *,
        component: Optional[str] = None,
        prefix: Optional[str] = None,
        names: Optional[Iterable[str]] = None,
    ) -> OpenModel:
        """Opens a model; it is in use until the `OpenModel` is closed or no longer referenced.

        By default with all tensors. `component` selects only the files with this role (`model`,
        `projector`, `template`, …), `prefix` only tensors whose name starts with it, `names` only
        these tensors; an empty list selects none. Raises `NotFoundError` if the model, the component
        or one of the names does not exist.
        """
        params: Dict[str, object] = {"reference": reference, "tensors": _selection(prefix, names)}
        if component is not None:
            params["component"] = component
        wire = self._connect()
        try:
            upgrade(wire, "/v1/open", params, self._ids.next_id())
            return receive(wire, self._digests_of)
        except BaseException:
            wire.close()
            raise

    def open_weights(self, reference: str, *, component: str = "") -> ManifestWeights:
        """Opens the tensors of a model that has a safetensors file per tensor, or those of one component,
        such as `transformer` or `text_encoder`. The daemon passes no descriptors for other tensors."""
        component = component.rstrip("/")
        model = self.open(reference, prefix=f"{component}/" if component else None)
        try:
            return ManifestWeights(model, component)
        except BaseException:
            model.close()
            raise

    def safe_open(
        self,
        reference: str,
        framework: str,
        device: Union[str, int] = "cpu",
        *,
        file: Optional[str] = None,
    ) -> SafeOpen:
        """Opens a model of safetensors files with the interface of `safetensors.safe_open`, without a copy on the CPU.

        `framework` is `numpy` or `pt`. All tensors of the model's files are under one view; `file` is the path of one
        file, or a folder of the model that ends in a slash, such as `vae/`. Raises `WeightsError` if the model has no
        such files, or the same tensor in several.
        """
        elements = choose_elements(framework, device)
        model = self._open_folder(reference, file)
        try:
            return SafeOpen(model, elements, file)
        except BaseException:
            model.close()
            raise

    def load_file(
        self, reference: str, device: Union[str, int] = "cpu", *, framework: str = "pt", file: Optional[str] = None
    ) -> Dict[str, Any]:
        """All tensors of a model of safetensors files by name; see `safe_open`."""
        with self.safe_open(reference, framework, device, file=file) as opened:
            return opened.get_tensors()

    def _open_folder(self, reference: str, file: Optional[str]) -> OpenModel:
        """Opens only the folder that the file is in, so that no descriptors come for other components."""
        folder = folder_of(file)
        try:
            return self.open(reference, component=folder)
        except NotFoundError:
            if folder is None:
                raise
            # Either the model does not exist, or the error about the folder names the files that do.
            return self.open(reference)

    def _digests_of(self, name: str, digest: str) -> ModelDetails:
        # With the manifest's digest, so that a name that now belongs to another model is an error.
        return self.model(f"{name}@{digest}")

    def _query(self, path: str) -> object:
        wire = self._connect()
        try:
            return query(wire, path, self._ids.next_id())
        finally:
            wire.close()

    def _connect(self) -> Wire:
        named = self._socket or os.environ.get(SOCKET_VARIABLE)
        paths = [named] if named else default_sockets()
        refused: Optional[BlobdError] = None
        for path in paths:
            try:
                return Wire(self._connected(path))
            except (FileNotFoundError, ConnectionRefusedError):
                evidence = evidence_of_service(path)
                if evidence is not None:
                    raise UnavailableError(path, evidence) from None
            except OSError as error:
                refused = refused or _refused(path, error)
                if path == SYSTEM_SOCKET:
                    break
        raise refused or NotRunningError(" or ".join(paths))

    def _connected(self, path: str) -> sockets.socket:
        check_before_connecting(path)
        stream = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC)
        try:
            stream.settimeout(self._timeout)
            stream.connect(path)
        except BaseException:
            stream.close()
            raise
        return stream


def _selection(prefix: Optional[str], names: Optional[Iterable[str]]) -> object:
    if prefix is not None and names is not None:
        raise ValueError("tensors: prefix and names exclude each other; give one")
    if isinstance(names, str):
        raise TypeError("names: expected a list of names, found one text; write [name]")
    if prefix is not None:
        return {"prefix": prefix}
    if names is None:
        return "all"
    listed = list(names)
    return {"names": listed} if listed else "none"


def _refused(path: str, error: OSError) -> ConnectError:
    denied = isinstance(error, PermissionError)
    advice = hint(path, error)
    refused = ConnectError(f"blobd daemon: cannot connect to {path}: {error}{advice and '; '}{advice}")
    refused.code = "denied" if denied else "internal"
    return refused


