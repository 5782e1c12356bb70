"""Messages in columns. Invariant: whatever is stored there stops neither the store nor work that does not need it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import structlog
from google.protobuf.message import DecodeError

__all__ = ["UNREADABLE", "read_column", "unreadable_columns"]

UNREADABLE = "The stored data cannot be read."
"""Reports a failure to read a message."""

_log = structlog.get_logger()


def read_column(message: Any, stored: bytes | None, *, max_bytes: int | None = None) -> Any:
    """Returns a stored message; None if there is none, or if it cannot be read, which is logged once.

    Args:
        message: The class of the message.
        stored: The column's value.
        max_bytes: Size beyond which it is not read, because nothing of that size is written; None for any.
    """
    if stored is None:
        return None
    if max_bytes is None or len(stored) <= max_bytes:
        try:
            return message.FromString(stored)
        except DecodeError:
            pass
    _report(message.DESCRIPTOR.full_name, len(stored), hashlib.sha256(stored).digest())
    return None


def unreadable_columns() -> int:
    """Returns how many values this process could not read; the same one counts once while it is remembered."""
    return _report.cache_info().misses


@lru_cache(maxsize=256)
def _report(name: str, size_bytes: int, digest: bytes) -> None:
    # The digest distinguishes values; the values themselves would fill the memory.
    del digest
    _log.error("column_unreadable", message=name, size_bytes=size_bytes)
