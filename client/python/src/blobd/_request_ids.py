"""The IDs of requests, which relate what a program did to what the daemon's logs say about it."""

from __future__ import annotations

import itertools
import re
import secrets
from typing import Optional, Tuple, Type

MAX_PREFIX_LENGTH = 43
"""Leaves room for the point and any number: an ID has at most 64 characters."""
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,%d}" % MAX_PREFIX_LENGTH)


class RequestIds:
    """The IDs of a client's requests: a prefix, a point and a number. Threads can share it.

    Without a prefix it is random. Raises `ValueError` if the prefix has characters that are not
    allowed, or too many.
    """

    def __init__(self, prefix: Optional[str] = None) -> None:
        if prefix is not None and not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"request_prefix: expected 1 to {MAX_PREFIX_LENGTH} letters, digits, `.`, `-` and `_`"
            )
        self._chosen = prefix
        self._prefix = secrets.token_hex(6) if prefix is None else prefix
        # `next` of it is atomic.
        self._numbers = itertools.count(1)

    def next_id(self) -> str:
        """Returns a new ID."""
        return f"{self._prefix}.{next(self._numbers)}"

    def __reduce__(self) -> Tuple[Type[RequestIds], Tuple[Optional[str]]]:
        # A copy in another process does not continue the count, but has its own random prefix.
        return type(self), (self._chosen,)
