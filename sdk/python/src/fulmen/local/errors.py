"""What can go wrong with a local stack: each error says in one line what happened and what to do."""

from __future__ import annotations

__all__ = [
    "ExtraMissingError",
    "PortInUseError",
    "ServiceFailedError",
    "StackError",
    "StackNotRunningError",
    "StackRunningError",
]


class StackError(Exception):
    """Raised when the local stack cannot do what was asked; the text is for a person."""


class StackRunningError(StackError):
    """Raised when a stack already runs on the state folder."""


class StackNotRunningError(StackError):
    """Raised when no stack runs on the state folder."""


class PortInUseError(StackError):
    """Raised when a port that was asked for by number is taken."""


class ExtraMissingError(StackError):
    """Raised when a part of the local stack is not installed."""


class ServiceFailedError(StackError):
    """Raised when a service did not become ready, or died too often."""
