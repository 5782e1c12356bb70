"""The error of a malformed request: its invalid fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fulmen.errors import ArgumentInvalid, Violation

__all__ = ["malformed", "malformed_request", "noted"]


def malformed(field: str, description: str) -> ArgumentInvalid:
    """Returns the error of a request with one problem."""
    return malformed_request([Violation(field=field, description=description)])


def malformed_request(problems: Sequence[Violation]) -> ArgumentInvalid:
    """Returns the error of a request with some problems."""
    return ArgumentInvalid("The request is malformed.", violations=problems)


@contextmanager
def noted(problems: list[Violation]) -> Iterator[None]:
    """Adds the problems of one part of a request to the others', so that one error lists them all."""
    try:
        yield
    except ArgumentInvalid as error:
        problems.extend(error.violations)
