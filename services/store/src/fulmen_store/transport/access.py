"""Access checks: the project and the attempt that a token is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

from fulmen.ids import ALL_PROJECTS, parse_training_run_name
from fulmen.store.v1 import run_lease_service_pb2
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_service_kit.security.tokens import Role
from fulmen_store.malformed import malformed
from fulmen_store.run_leases.run_leases import RunFence

__all__ = [
    "is_own_attempt",
    "project_limit",
    "require_count",
    "require_range",
    "run_fence",
    "run_project",
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


def run_project(project: str, training_run: str) -> str:
    """Returns the project of a request, by default the project of the training run that it names, if any.

    Raises:
        ArgumentInvalid: If the name of the run is malformed.
        PermissionDenied: If the caller is bound to another project.
    """
    if training_run:
        project = project or parse_training_run_name(training_run).project
    return require_project(project)


class Fenced(Protocol):
    """A request that may carry a `RunFence`."""

    @property
    def run_fence(self) -> run_lease_service_pb2.RunFence:
        """The fence; unset if the caller runs no training run."""


def run_fence(request: Fenced) -> RunFence | None:
    """Returns the epoch under which the caller runs a training run; None if it names none."""
    fence = request.run_fence
    return RunFence(training_run=fence.training_run, epoch=fence.epoch) if fence.training_run else None
