"""Messages in columns. Invariant: whatever is stored there stops neither the store nor work that does not need it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import structlog
from google.protobuf.message import DecodeError

__all__ = ["UNREADABLE", "read_column", "unreadable_columns"]

UNREADABLE = "What the store has of it cannot be read."
"""Tells people of a failure to read a message."""

_log = structlog.get_logger()


def read_column(message: Any, stored: bytes | None) -> Any:
    """Returns a stored message; None if there is none, or if it cannot be read, which the log says once.

    Args:
        message: The class of the message.
        stored: The column's value.
    """
    if stored is None:
        return None
    try:
        return message.FromString(stored)
    except DecodeError:
        _report(message.DESCRIPTOR.full_name, stored)
        return None


def unreadable_columns() -> int:
    """Returns how many different values this process could not read."""
    return _report.cache_info().misses


@lru_cache(maxsize=256)
def _report(name: str, stored: bytes) -> None:
    _log.error("column_unreadable", message=name, size_bytes=len(stored))
