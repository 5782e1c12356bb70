"""Access checks: the project and the attempt that a token is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.security.auth import current_caller
from fulmen_service_kit.security.tokens import Role
from fulmen_store.malformed import malformed

__all__ = [
    "is_own_attempt",
    "project_limit",
    "require_count",
    "require_range",
]


def project_limit() -> str | None:
    """Returns the project that the caller is bound to; None if it may access all."""
    project = current_caller().project
    return None if project == ALL_PROJECTS else project


def is_own_attempt(project: str, rollout_id: UUID, number: int | None = None) -> bool:
    """Returns whether an attempt key covers a rollout, or one attempt of it; True for every other role."""
    caller = current_caller()
    if caller.role is not Role.ATTEMPT:
        return True
    own = caller.attempt
    return own is not None and (own.project, own.rollout_id) == (project, rollout_id) and number in (None, own.number)


def require_count(items: Sequence[object], *, field: str, maximum: int) -> None:
    """Checks the number of entries of a repeated field.

    Raises:
        ArgumentInvalid: If it is empty or has more than `maximum` entries.
    """
    if not 1 <= len(items) <= maximum:
        raise malformed(field, f"has {len(items)} entries, allowed are 1 to {maximum}")


def require_range(field: str, value: float, minimum: float, maximum: float) -> None:
    """Checks a number of a request.

    Raises:
        ArgumentInvalid: If it is below `minimum` or above `maximum`.
    """
    if not minimum <= value <= maximum:
        raise malformed(field, f"is {value:g}, allowed are {minimum:g} to {maximum:g}")
