"""Notifications between replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fulmen.ids import AttemptName

__all__ = [
    "CancelHint",
    "Notification",
]

MAX_CANCELS: Final = 1000
MAX_ORDERED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelHint:
    """An attempt with a requested cancellation, and the runner session that holds it."""

    session_id: UUID
    attempt: AttemptName


@dataclass(slots=True, kw_only=True)
class Notification:
    """Events at a replica; projects are given by database number.

    Attributes:
        ready: Projects with waiting rollouts for which the sender had no runner.
        finished: Projects in which rollouts became final.
        resources: Projects whose resources changed.
        projects_changed: Whether a project was added or changed.
        ordered: Runner sessions with new orders.
        cancels: Attempts to cancel; more than 1,000 are left to the runners' renewals.
    """

    ready: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    resources: set[int] = field(default_factory=set)
    projects_changed: bool = False
    ordered: set[UUID] = field(default_factory=set)
    cancels: list[CancelHint] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Returns whether the notification has any content."""
        projects = self.ready or self.finished or self.resources or self.projects_changed
        return bool(projects or self.ordered or self.cancels)

    def add(self, later: Notification) -> None:
        """Merges a later notification."""
        self.ready |= later.ready
        self.finished |= later.finished
        self.resources |= later.resources
        self.projects_changed |= later.projects_changed
        self.ordered |= later.ordered
        self.cancels += later.cancels[: MAX_CANCELS - len(self.cancels)]
