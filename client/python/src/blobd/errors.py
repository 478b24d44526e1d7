"""The errors of the client.

Every error is a `BlobdError` and has a `code` of the protocol. Programs should decide by class or
code; the text is for people and says what to do next.
"""

from __future__ import annotations

from typing import Dict, Optional, Type

CODES = frozenset(
    {
        "invalid_request",
        "invalid_input",
        "not_found",
        "busy",
        "corrupt",
        "no_space",
        "over_quota",
        "read_only",
        "denied",
        "denied_by_policy",
        "upstream",
        "unavailable",
        "internal",
    }
)
"""The codes of protocol version 1; any other code counts as `internal`."""


class BlobdError(Exception):
    """Why a request failed, or why an open model cannot be read."""

    code: str = "internal"
    """The kind of the error, as the protocol names it."""


class DaemonError(BlobdError):
    """The daemon's error response."""

    def __init__(
        self, code: str, message: str, hint: Optional[str] = None, request: Optional[str] = None
    ) -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.code = code if code in CODES else "internal"
        self.message = message
        self.hint = hint
        self.request = request
        """The ID of the request that failed, under which the daemon's log has it."""

    def __reduce__(self) -> tuple[type[DaemonError], tuple[str, str, Optional[str], Optional[str]]]:
        # Exceptions are pickled by their arguments.
        return type(self), (self.code, self.message, self.hint, self.request)


class NotFoundError(DaemonError):
    """There is no such model, or it has no such tensor."""


class BusyError(DaemonError):
    """Another operation holds what is needed."""


class CorruptError(DaemonError):
    """Stored data is damaged."""


class DeniedError(DaemonError):
    """The caller is not allowed to do this."""


class NotRunningError(BlobdError):
    """There is no socket, or no daemon listens on it."""

    code = "unavailable"

    def __init__(self, socket: str) -> None:
        super().__init__(f"blobd daemon: nothing listens on {socket}; start it with `blobd serve`")
        self.socket = socket

    def __reduce__(self) -> tuple[type[NotRunningError], tuple[str]]:
        return type(self), (self.socket,)


class UnavailableError(BlobdError):
    """Nothing listens on the system's socket, although this machine has a daemon for all its users.

    A program that used another daemon now would not find the models of the system.
    """

    code = "unavailable"

    def __init__(self, socket: str, evidence: str) -> None:
        super().__init__(
            f"blobd daemon: nothing listens on {socket}, although {evidence} exists; see `systemctl status blobd`, "
            "or name another socket in BLOBD_SOCKET"
        )
        self.socket = socket
        self.evidence = evidence
        """A file that only machines with such a daemon have."""

    def __reduce__(self) -> tuple[type[UnavailableError], tuple[str, str]]:
        return type(self), (self.socket, self.evidence)


class ConnectError(BlobdError):
    """The socket exists, but connecting to it failed, for instance without permission."""


class ConnectionFailedError(BlobdError):
    """The socket failed during a request."""


class ClosedError(BlobdError):
    """The daemon closed the connection before its response was complete."""

    def __init__(self) -> None:
        super().__init__("blobd daemon: closed the connection before its response was complete; see its log")


class TimedOutError(BlobdError):
    """The daemon neither received nor sent bytes within the client's timeout."""

    def __init__(self) -> None:
        super().__init__("blobd daemon: silent for longer than the timeout; try again or allow it longer")


class ProtocolError(BlobdError):
    """The received data does not follow the protocol."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"blobd daemon: {problem}; are client and daemon of the same version?")
        self.problem = problem

    def __reduce__(self) -> tuple[type[ProtocolError], tuple[str]]:
        return type(self), (self.problem,)


class FdsLostError(BlobdError):
    """Descriptors were lost because of this process's limit of open files."""

    def __init__(self) -> None:
        super().__init__(
            "descriptors: this process has too many files open to take those of the model; "
            "raise `ulimit -n` or close some"
        )


class ModelError(BlobdError):
    """An open model cannot be read as requested."""


class NoTensorError(ModelError, KeyError):
    """No tensor with this name was opened."""

    code = "not_found"

    def __str__(self) -> str:
        # `KeyError` would put its text in quotes.
        return str(self.args[0])


class NoFileError(ModelError, KeyError):
    """The model has no file with this path."""

    code = "not_found"

    def __str__(self) -> str:
        # `KeyError` would put its text in quotes.
        return str(self.args[0])


class ShortError(ModelError):
    """A descriptor's file is shorter than the tensor table says."""

    code = "corrupt"


class SessionClosedError(ModelError):
    """The model was closed by this program."""


class MapError(ModelError):
    """A file cannot be mapped."""


class GgufError(ModelError):
    """The header of a GGUF file is malformed."""

    code = "invalid_input"


class SafetensorsError(ModelError):
    """The header of a safetensors file is malformed."""

    code = "invalid_input"


class DtypeError(ModelError):
    """NumPy or PyTorch has no type for the elements of a tensor."""

    code = "invalid_request"


class SliceError(ModelError, IndexError):
    """An index is outside of its tensor, or of no kind that selects a part."""

    code = "invalid_request"


class WeightsError(ModelError):
    """The tensors of a model's layers cannot be read as requested."""

    def __init__(self, message: str, code: str = "invalid_input") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[WeightsError], tuple[str, str]]:
        return type(self), (str(self), self.code)


_CLASS_OF_CODE: Dict[str, Type[DaemonError]] = {
    "not_found": NotFoundError,
    "busy": BusyError,
    "corrupt": CorruptError,
    "denied": DeniedError,
    "denied_by_policy": DeniedError,
}


def daemon_error(code: str, message: str, hint: Optional[str], request: Optional[str]) -> DaemonError:
    """An error response as an exception of the class for its code."""
    return _CLASS_OF_CODE.get(code, DaemonError)(code, message, hint, request)
