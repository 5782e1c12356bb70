"""Errors of the local stack. Each message states the failure and the remedy in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ExtraMissingError",
    "PortInUseError",
    "ServiceFailedError",
    "StackError",
    "StackNotRunningError",
    "StackRunningError",
    "extra_needed",
]


class StackError(Exception):
    """Raised when the local stack cannot do what was asked; the text is for a person."""


class StackRunningError(StackError):
    """Raised when a stack already runs on the state folder."""


class StackNotRunningError(StackError):
    """Raised when no stack runs on the state folder."""


class PortInUseError(StackError):
    """Raised when a requested port is in use."""


class ExtraMissingError(StackError):
    """Raised when a part of the local stack is not installed."""


class ServiceFailedError(StackError):
    """Raised when a service did not become ready, or crashed too often."""


@contextmanager
def extra_needed(reason: str) -> Iterator[None]:
    """Turns the failed import of a Fulmen distribution into an error that names the extra.

    Raises:
        ExtraMissingError: if a distribution of the extra `local` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fulmen"):
            raise ExtraMissingError(f'{reason}: pip install "fulmen[local]".') from None
        raise
