"""Usage of model calls and rate-limit windows in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from fulmen.ids import AttemptName
from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen_store.database.database import Database, columns
from fulmen_store.database.stored import read_column
from fulmen_store.projects.names import NO_PROJECT
from fulmen_store.usage.series import SeriesRow, SeriesSelection, first_id
from fulmen_store.usage.usage import (
    OtherWindows,
    Selection,
    Spends,
    StoredSpend,
    StoredUsage,
    UsageGroup,
    UsageReport,
    Window,
)

__all__ = ["EndedRow", "UsageTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRow:
    """The owner of an attempt, and its runner's description of itself, serialized; names are empty without one."""

    project: str = ""
    training_run: str = ""
    agent: str = ""
    info: bytes | None = None


class UsageTable:
    """Reads and writes usage and rate-limit windows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(
        self, instance_id: str, sequence: int, rows: Sequence[StoredUsage], spend: Sequence[StoredSpend]
    ) -> bool:
        """Adds usage and the cost of budgets in one commit; returns False if this sequence number was already added."""
        added = columns(rows, 11)
        async with self._database.transaction() as transaction:
            if await transaction.fetch_row("begin_usage", instance_id, sequence) is None:
                return False
            await transaction.fetch("add_usage_minutes", *added)
            if any(row[1] is not None for row in rows):
                await transaction.fetch("add_usage_attempts", *added)
                projects, rollouts, *_, prompts, _, completions, costs = added
                await transaction.fetch("add_usage_rollouts", projects, rollouts, prompts, completions, costs)
            if spend:
                await transaction.fetch("add_spend", *columns(spend, 4))
        return True

    async def spends(self, *, project: str | None) -> Spends:
        """Returns what is spent of budgets in their current periods, millionths of a dollar; a missing one is 0."""
        rows = await self._database.fetch("spends", project)
        return {(row["project"], row["subject"], row["period"]): row["cost_micros"] for row in rows}

    async def ended_rows(self, attempts: Sequence[tuple[UUID, UUID]]) -> list[EndedRow]:
        """Returns what is known of attempts by rollout and session, in order; of removed rollouts nothing."""
        found = {row["n"]: row for row in await self._database.fetch("ended_rows", *columns(attempts, 2))}
        return [
            EndedRow(project=row["project"], training_run=row["training_run"], agent=row["agent"], info=row["info"])
            if (row := found.get(n)) is not None
            else EndedRow()
            for n in range(1, len(attempts) + 1)
        ]

    async def pause_used_up(self, reasons: Mapping[str, str], *, mark: str) -> list[tuple[str, bool]]:
        """Pauses the queues of projects with a reason, and resumes other projects' queues that were paused for it.

        Returns the changed projects, each with whether it is paused now.

        Args:
            reasons: By project; each begins with `mark`.
            mark: How the reasons begin.
        """
        rows = await self._database.fetch("pause_used_up", list(reasons), list(reasons.values()), mark)
        return [(row["name"], row["is_paused"]) for row in rows]

    async def replace_windows(self, report: UsageReport) -> None:
        """Replaces the windows of a process."""
        values = (report.instance_id, report.scope, report.slot, report.windows)
        await self._database.fetch("replace_windows", *values)

    async def clock(self) -> datetime.datetime:
        """Returns the database's time."""
        row = await self._database.fetch_row("usage_clock")
        assert row is not None
        return row["store_time"]

    async def other_windows(self, instance_id: str, *, project: str | None) -> list[OtherWindows]:
        """Returns the windows that other processes reported within the last minute, optionally of one project."""
        rows = await self._database.fetch("other_windows", instance_id, project)
        return [
            OtherWindows(slot=row["slot"], is_live=row["is_live"], windows=_windows(row["windows"])) for row in rows
        ]

    async def attempt_tokens(self, attempts: Sequence[AttemptName]) -> list[tuple[AttemptName, int]]:
        """Returns the tokens used by attempts; omits attempts that used none."""
        keys = [(each.rollout_id, each.number, each.project) for each in attempts]
        rows = await self._database.fetch("attempt_tokens", *columns(keys, 3)) if attempts else []
        return [(attempts[row["n"] - 1], row["token_count"]) for row in rows]

    async def model_limits(self, *, project: str | None) -> list[tuple[str, bytes]]:
        """Returns the projects with limits, optionally only the given one, each with its limits in stored form."""
        rows = await self._database.fetch("model_limits", project)
        return [(row["name"], row["model_limits"]) for row in rows]

    async def page(self, selection: Selection, *, limit: int) -> list[UsageGroup]:
        """Returns groups ordered by name."""
        one = selection
        if one.is_by_attempt:
            first, last = one.rollouts
            what = (one.project_id, one.run_id, first, last, one.grouping, one.after, limit)
            rows = await self._database.fetch("usage_by_attempt", *what)
        else:
            when = (one.project_id, one.start, one.end, one.grouping, one.after, limit)
            rows = await self._database.fetch("usage_by_minute", *when)
        return [_group(row) for row in rows]

    async def series(self, asked: SeriesSelection) -> list[SeriesRow]:
        """Returns what was used in each period, by the place of the group and then by period."""
        starts = asked.periods.starts_and_end
        if asked.is_by_attempt:
            (project_id,) = asked.project_ids or [NO_PROJECT]
            bounds = [first_id(start) for start in starts]
            rows = await self._database.fetch(
                "usage_series_by_attempt", project_id, asked.run_id, bounds, asked.grouping, asked.max_series
            )
        else:
            rows = await self._database.fetch(
                "usage_series_by_minute", asked.project_ids, starts, asked.grouping, asked.max_series
            )
        return [_series_row(row) for row in rows]

    async def delete_expired(self, limit: int) -> int:
        """Removes up to `limit` rows of each kind that are past their project's retention; returns their number."""
        minutes = await self._database.fetch("delete_usage_minutes", limit)
        attempts = await self._database.fetch("delete_usage_attempts", limit)
        return len(minutes) + len(attempts)


def _group(row: asyncpg.Record) -> UsageGroup:
    name, *counts = row
    requests, failures, prompt, cached, completion, cost = counts
    return UsageGroup(name=name, counts=(requests, failures, prompt, cached, completion, cost))


def _series_row(row: asyncpg.Record) -> SeriesRow:
    place, period, name, *counts, total_count = row
    requests, failures, prompt, cached, completion, cost = counts
    return SeriesRow(
        place=place,
        # The first has the number 1.
        period=period - 1,
        name=name,
        counts=(requests, failures, prompt, cached, completion, cost),
        total_count=total_count,
    )


def _windows(stored: bytes) -> list[Window]:
    request = read_column(pb.SyncUsageRequest, stored) or pb.SyncUsageRequest()
    return [
        Window(
            key=(window.project, window.backend, window.attempt),
            requests=window.request_counts,
            tokens=window.token_counts,
            in_flight=window.in_flight_count,
            reserved=window.reserved_token_count,
        )
        for window in request.windows
    ]
