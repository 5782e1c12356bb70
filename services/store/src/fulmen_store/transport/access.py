"""Access checks: the project and the attempt that a token is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fulmen.errors import PermissionDenied
from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.auth import current_caller
from fulmen_service_kit.tokens import Role
from fulmen_store.malformed import malformed

__all__ = [
    "is_own_attempt",
    "project_limit",
    "require_all_projects",
    "require_count",
    "require_project",
    "require_range",
]

MAX_NAME = 128


def require_project(name: str) -> str:
    """Returns the project to work in; unset means the token's own, or the default one with a token for all.

    Raises:
        PermissionDenied: If the caller is bound to another project. The token alone decides: whether the
            project exists is not checked.
    """
    caller = current_caller()
    project = name or caller.own_project
    if not caller.may_access(project):
        raise PermissionDenied("The token belongs to another project.", role=caller.role, project=project[:MAX_NAME])
    return project


def require_all_projects() -> None:
    """Checks that the caller may access all projects.

    Raises:
        PermissionDenied: If its token is bound to one.
    """
    if project_limit() is not None:
        raise PermissionDenied("A token for all projects is required.", role=current_caller().role)


def project_limit() -> str | None:
    """Returns the only project whose things the caller may see; None if it may see all."""
    project = current_caller().project
    return None if project == ALL_PROJECTS else project


def is_own_attempt(project: str, rollout_id: UUID, number: int | None = None) -> bool:
    """Returns whether an attempt key reaches a rollout (or one attempt of it); true for every other role."""
    caller = current_caller()
    if caller.role is not Role.ATTEMPT:
        return True
    own = caller.attempt
    return own is not None and (own.project, own.rollout_id) == (project, rollout_id) and number in (None, own.number)


def require_count(items: Sequence[object], *, field: str, maximum: int) -> None:
    """Checks how many entries a repeated field has.

    Raises:
        ArgumentInvalid: If there are none, or more than `maximum`.
    """
    if not 1 <= len(items) <= maximum:
        raise malformed(field, f"has {len(items)} entries, allowed are 1 to {maximum}")


def require_range(field: str, value: float, minimum: float, maximum: float) -> None:
    """Checks a number of a request.

    Raises:
        ArgumentInvalid: If it is outside its range, limits included.
    """
    if not minimum <= value <= maximum:
        raise malformed(field, f"is {value:g}, allowed are {minimum:g} to {maximum:g}")
