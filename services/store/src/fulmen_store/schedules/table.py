"""Schedules in PostgreSQL."""

from __future__ import annotations

import datetime
from typing import Any, Final

import asyncpg
import structlog

from fulmen.ids import uuid7s
from fulmen_store.database.database import Database, Transaction
from fulmen_store.schedules.due_times import latest_due, next_due
from fulmen_store.schedules.records import (
    ClaimedRun,
    DueSchedule,
    MissedPolicy,
    NewSchedule,
    OverlapPolicy,
    RunState,
    RunView,
    ScheduleView,
)

__all__ = ["ScheduleTable"]

RUNS_KEPT: Final = 100
MISSED_AFTER: Final = datetime.timedelta(minutes=1)
# A replica that has not created the rollouts of a due time in this time has probably died.
RETRY_AFTER_S: Final = 10.0

_log = structlog.get_logger()


class ScheduleTable:
    """Reads and writes schedules and their runs."""

    def __init__(self, database: Database, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        """Creates the table; a run that is not reported within `retry_after_s` seconds is continued by another replica."""
        self._database = database
        self._retry_after_s = retry_after_s

    async def create(self, project_id: int, new: NewSchedule, *, max_count: int) -> ScheduleView | None:
        """Adds a schedule; returns None if its name is taken, or the project has `max_count` others."""
        async with self._database.transaction() as transaction:
            lock = await transaction.fetch_row("lock_schedules", project_id)
            due = None if lock is None else next_due(new.cron, new.time_zone, lock["now"])
            row = await transaction.fetch_row(
                "create_schedule", project_id, new.name, new.spec, new.cron, new.time_zone, new.overlap_policy,
                new.missed_policy, new.rollout_count, due, max_count,
            )  # fmt: skip
        return None if row is None else _view(row)

    async def get(self, project_id: int, name: str) -> ScheduleView | None:
        """Returns a schedule; None if it does not exist."""
        row = await self._database.fetch_row("get_schedule", project_id, name)
        return None if row is None else _view(row, spec=row["spec"], read_at=row["now"])

    async def list_all(self, project_id: int) -> list[ScheduleView]:
        """Returns the schedules of a project by name, each with its latest run."""
        return [
            _view(row, last_run=None if row["due_at"] is None else _run(row))
            for row in await self._database.fetch("list_schedules", project_id)
        ]

    async def runs(self, schedule_id: int, limit: int) -> list[RunView]:
        """Returns the latest runs of a schedule, newest first."""
        return [_run(row) for row in await self._database.fetch("list_schedule_runs", schedule_id, limit)]

    async def pause(self, project_id: int, name: str, reason: str) -> ScheduleView | None:
        """Pauses a schedule; returns None if it does not exist."""
        row = await self._database.fetch_row("pause_schedule", project_id, name, reason)
        return None if row is None else _view(row)

    async def resume(self, project_id: int, name: str) -> ScheduleView | None:
        """Resumes a schedule with its first time from now on; returns None if it does not exist."""
        view = await self.get(project_id, name)
        if view is None or view.paused_at is None or view.read_at is None:
            return view
        due = next_due(view.cron, view.time_zone, view.read_at)
        row = await self._database.fetch_row("resume_schedule", project_id, name, due)
        return await self.get(project_id, name) if row is None else _view(row)

    async def delete(self, project_id: int, name: str) -> bool:
        """Deletes a schedule with its runs; returns False if it does not exist."""
        return bool(await self._database.fetch("delete_schedule", project_id, name))

    async def due(self, limit: int) -> list[DueSchedule]:
        """Returns the schedules of all projects that are due, those that have waited longest first."""
        return [DueSchedule(**row) for row in await self._database.fetch("due_schedules", limit)]

    async def claim(self, schedule: DueSchedule) -> ClaimedRun | None:
        """Records the run of the latest due time and moves the schedule on to the next one, in one commit.

        Returns None if another replica has done so, or does it now.
        """
        async with self._database.transaction() as transaction:
            held = await transaction.fetch_row("hold_due_schedule", schedule.id, schedule.next_due)
            if held is None:
                return None
            latest = latest_due(schedule.cron, schedule.time_zone, schedule.now)
            due_at = max(schedule.next_due, latest or schedule.next_due)
            state = await self._state(transaction, schedule, held, due_at)
            run = ClaimedRun(
                schedule_id=schedule.id,
                due_at=due_at,
                state=state,
                rollout_ids=uuid7s(held["rollout_count"]) if state is RunState.STARTING else (),
            )
            is_new = await transaction.fetch(
                "start_schedule_run", run.schedule_id, run.due_at, run.state, run.rollout_ids, self._retry_after_s
            )
            following = next_due(schedule.cron, schedule.time_zone, max(schedule.now, due_at))
            if following is None:
                _log.warning("schedule_is_never_due_again", schedule_id=schedule.id, time_zone=schedule.time_zone)
            await transaction.fetch("set_next_due", schedule.id, following)
            await transaction.fetch("remove_old_schedule_runs", schedule.id, RUNS_KEPT)
        return run if is_new else None

    async def unfinished(self, limit: int) -> list[ClaimedRun]:
        """Claims runs of which nothing was reported in time."""
        rows = await self._database.fetch("continue_schedule_runs", self._retry_after_s, limit)
        return [ClaimedRun(**row, state=RunState.STARTING) for row in rows]

    async def spec(self, schedule_id: int) -> tuple[str, str, bytes] | None:
        """Returns the project, the name and the serialized message of a schedule; None if it was deleted."""
        row = await self._database.fetch_row("schedule_to_run", schedule_id)
        return None if row is None else (row["project"], row["name"], row["spec"])

    async def end(self, run: ClaimedRun, state: RunState, *, reason: str = "", message: str = "") -> float | None:
        """Records how a run ended; returns how long after its due time, seconds, or None if another replica has."""
        row = await self._database.fetch_row("end_schedule_run", run.schedule_id, run.due_at, state, reason, message)
        return None if row is None else row["delay_s"]

    async def _state(
        self, transaction: Transaction, schedule: DueSchedule, held: asyncpg.Record, due_at: datetime.datetime
    ) -> RunState:
        if held["missed_policy"] == MissedPolicy.SKIP and schedule.now - due_at > MISSED_AFTER:
            return RunState.MISSED
        if held["overlap_policy"] == OverlapPolicy.SKIP:
            row = await transaction.fetch_row("schedule_is_running", schedule.id)
            if row is not None and row["is_running"]:
                return RunState.SKIPPED
        return RunState.STARTING


SHOWN: Final = (
    "id", "name", "cron", "time_zone", "overlap_policy", "missed_policy", "rollout_count", "created_at", "paused_at",
    "pause_reason", "next_due",
)  # fmt: skip
RUN: Final = ("due_at", "claimed_at", "state", "rollout_ids", "failure_reason", "failure_message")


def _view(row: asyncpg.Record, **more: Any) -> ScheduleView:
    return ScheduleView(**{name: row[name] for name in SHOWN}, **more)


def _run(row: asyncpg.Record) -> RunView:
    return RunView(**{name: row[name] for name in RUN})
