"""Changes of live rollouts, and pauses of projects' queues.

Invariant: a change of a priority and of the project's `order_revision` are one commit. Replicas follow the projects, so
that all of them read the backlog again in its new order.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Final
from uuid import UUID

from fulmen.errors import RolloutStateInvalid, Violation
from fulmen.ids import rollout_name
from fulmen_store.clock import Clock
from fulmen_store.database.database import Database
from fulmen_store.malformed import malformed
from fulmen_store.replicas.wakeups import PROJECTS_CHANGED, Wakeups
from fulmen_store.rollouts.codec import changed_rollout
from fulmen_store.rollouts.records import RolloutView
from fulmen_store.rollouts.requests import NewRollout, RolloutChange, change_problems

__all__ = ["ChangeTable", "QueueChanges"]

MAX_REASON: Final = 256


class ChangeTable:
    """Changes live rollouts, and pauses queues."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def change(self, rollout_id: UUID, changed: Callable[[bytes], NewRollout]) -> bool:
        """Replaces the request of a live rollout by what `changed` makes of it, in one commit; False if it has ended."""
        async with self._database.transaction() as transaction:
            held = await transaction.fetch_row("hold_item", rollout_id)
            stored = None if held is None else await transaction.fetch_row("current_request", rollout_id)
            if held is None or stored is None:
                return False
            new = changed(stored["request"])
            await transaction.fetch("change_rollout", rollout_id, new.sort_priority, new.deadline, new.request)
            if new.sort_priority != held["sort_priority"]:
                await transaction.fetch("reorder_project", held["project_id"])
        return True

    async def pause(self, project_id: int, reason: str) -> datetime.datetime:
        """Pauses a queue, or changes the reason; returns since when it is paused."""
        row = await self._database.fetch_row("pause_queue", project_id, reason)
        assert row is not None
        paused_at: datetime.datetime = row["paused_at"]
        return paused_at

    async def resume(self, project_id: int) -> bool:
        """Resumes a queue; returns whether it was paused."""
        row = await self._database.fetch_row("resume_queue", project_id)
        return row is not None and row["was_paused"]


class QueueChanges:
    """Changes what waits in a queue, and whether it is served."""

    def __init__(self, *, table: ChangeTable, wakeups: Wakeups, clock: Clock | None = None) -> None:
        """Creates the use cases; `wakeups` notifies all replicas that a project has changed."""
        self._table = table
        self._wakeups = wakeups
        self._clock = clock or Clock()

    def problems(self, change: RolloutChange) -> list[Violation]:
        """Returns every problem of a change."""
        return change_problems(change, now_ms=round(self._clock.utc_now().timestamp() * 1000))

    async def update(self, view: RolloutView, change: RolloutChange) -> None:
        """Changes a live rollout.

        Raises:
            RolloutStateInvalid: If it is final, or its stored request is unreadable.
        """

        def changed(request: bytes) -> NewRollout:
            new = changed_rollout(request, change)
            if new is None:
                raise _refused(view, "The stored request of the rollout cannot be read, so it cannot be changed.")
            return new

        if not await self._table.change(view.rollout_id, changed):
            raise _refused(view, "A final rollout cannot be changed.")
        self._wakeups.announce([PROJECTS_CHANGED])

    async def pause(self, project_id: int, reason: str) -> datetime.datetime:
        """Pauses a project's queue; returns since when it is paused.

        Raises:
            ArgumentInvalid: If the reason is too long.
        """
        if len(reason) > MAX_REASON:
            raise malformed("reason", f"is longer than {MAX_REASON} characters")
        paused_at = await self._table.pause(project_id, reason)
        self._wakeups.announce([PROJECTS_CHANGED])
        return paused_at

    async def resume(self, project_id: int) -> bool:
        """Resumes a project's queue; returns whether it was paused."""
        was_paused = await self._table.resume(project_id)
        self._wakeups.announce([PROJECTS_CHANGED])
        return was_paused


def _refused(view: RolloutView, text: str) -> RolloutStateInvalid:
    name = rollout_name(view.project, view.rollout_id)
    return RolloutStateInvalid(text, rollout=name, state=view.state.name)
