"""Where daemons listen by default, whether this machine has one for all its users, and what to do about a socket
that refuses this user."""

from __future__ import annotations

import errno
import grp
import os
import stat
from typing import List, Optional

SYSTEM_SOCKET = "/run/blobd/blobd.sock"
"""The socket of the system's daemon."""


_UNIT_DIRECTORIES = (
    "/etc/systemd/system",
    "/run/systemd/transient",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_SYSTEM_UNITS = ("blobd.socket", "blobd.service")
_SYSTEM_CONFIGURATION = "/etc/blobd/config.toml"


def evidence_of_service(socket: str) -> Optional[str]:
    """What proves, while nothing listens at `socket`, that it is the socket of a daemon for all users: itself, or a
    file of its installation. `None` for other sockets, and on machines without such a daemon."""
    if socket != SYSTEM_SOCKET:
        return None
    units = [f"{directory}/{unit}" for unit in _SYSTEM_UNITS for directory in _UNIT_DIRECTORIES]
    # A link to /dev/null masks a unit, and may outlive it.
    installed = [unit for unit in units if _is_present(unit) and not _is_mask(unit)]
    others = [path for path in (socket, _SYSTEM_CONFIGURATION) if _is_present(path)]
    return next(iter(installed + others), None)


def _is_present(path: str) -> bool:
    """Whether something is there or may be: what this user may not see counts as existing."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _is_mask(unit: str) -> bool:
    try:
        return os.readlink(unit) == os.devnull
    except OSError:
        return False


def default_sockets() -> List[str]:
    """The sockets that are tried if none is given, in this order: the system's, then those at which this
    user's daemon may listen. A client uses the latter only on a machine without a daemon for all users."""
    usual = f"/run/user/{os.geteuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    directories = [runtime, usual] if os.path.isabs(runtime) and runtime != usual else [usual]
    in_runtime = [os.path.join(directory, "blobd/blobd.sock") for directory in directories]
    return [SYSTEM_SOCKET, *in_runtime, os.path.join(private_directory(), "blobd.sock")]


def private_directory() -> str:
    """The directory for the socket of a user without a runtime directory."""
    return f"/tmp/blobd-{os.geteuid()}"


def check_before_connecting(path: str) -> None:
    """Raises `PermissionError` if another user could have put the socket into the private directory."""
    directory = private_directory()
    if os.path.dirname(path) == directory:
        check_private(directory, os.geteuid())


def check_private(directory: str, uid: int) -> None:
    found = os.lstat(directory)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{directory}: not a directory")
    if found.st_uid != uid:
        raise PermissionError(f"{directory}: wrong owner: expected uid {uid}, found uid {found.st_uid}")
    if mode & 0o077:
        raise PermissionError(f"{directory}: wrong mode: expected 0700, found {mode:04o}")


def hint(path: str, error: OSError) -> str:
    """What to do when the kernel refuses a connection; empty if this is not known."""
    if error.errno != errno.EACCES:
        return ""
    try:
        found = os.stat(path)
    except OSError:
        return "a directory of its path does not admit you; the daemon's owner can set socket to another path"
    return hint_for(found.st_mode, found.st_uid, found.st_gid)


def hint_for(mode: int, uid: int, gid: int) -> str:
    # Not every member of root's group should be made one to use a model.
    if not mode & stat.S_IWGRP or gid == 0:
        return f"only uid {uid} may connect; the daemon's owner can set socket_group in its configuration"
    try:
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        group = str(gid)
    return f"join the group {group} and log in again"
