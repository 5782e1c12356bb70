"""The registry's reads of runner sessions in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import asyncpg

from fulmen.ids import attempt_name
from fulmen_store.database.database import Database
from fulmen_store.projects.names import ProjectNames
from fulmen_store.scheduling.runner_streams import RunnerOrdered

__all__ = [
    "OrderTable",
    "RunnerTable",
    "RunnerView",
]

# Each of a live runner.
PENDING_READ: Final = 10_000


class RunnerTable:
    """Reads live sessions and what they run."""

    def __init__(self, database: Database, projects: ProjectNames) -> None:
        self._database = database
        self._projects = projects

    async def page(
        self, *, after: UUID, limit: int, project: str | None, with_history: bool = False
    ) -> list[RunnerView]:
        """Returns live sessions that may serve a project, oldest first, with their attempts of it; None for all projects."""
        return await self._views(await self._database.fetch("list_runners", after, limit, project, with_history))

    async def find(self, session_id: UUID, *, project: str | None) -> RunnerView | None:
        """Returns one live session if it may serve a project, with its attempts of it; None for all projects."""
        found = await self._views(await self._database.fetch("find_runner", session_id, project))
        return found[0] if found else None

    async def _views(self, rows: Sequence[asyncpg.Record]) -> list[RunnerView]:
        await self._projects.load(project_id for row in rows for project_id in row["projects"] or ())
        return [_view(row, self._projects) for row in rows]


def _view(row: asyncpg.Record, projects: ProjectNames) -> RunnerView:
    attempts = zip(row["projects"] or (), row["rollouts"] or (), row["epochs"] or (), strict=True)
    return RunnerView(
        session_id=row["id"],
        info=row["info"],
        opened_at=row["opened_at"],
        lease_until=row["lease_until"],
        running=row["running"],
        attempts=[
            attempt_name(projects.name(project_id), rollout_id, epoch) for project_id, rollout_id, epoch in attempts
        ],
        load=row["load"],
        load_history=list(zip(row["load_minutes"], row["loads"], strict=True)),
        ended=row["ended_count"],
        failed=row["failed_count"],
        project=row["project"],
        order=_order(row) if row["order_number"] else None,
        is_order_pending=row["order_number"] > row["done_order"],
    )


def _order(row: asyncpg.Record) -> RunnerOrdered:
    return RunnerOrdered(
        number=row["order_number"],
        slots=row["ordered_slots"],
        drains=row["drain_ordered"],
        grace_s=row["drain_grace_s"],
    )


class OrderTable:
    """Reads and writes orders of live sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, session_id: UUID, *, slots: int | None, drains: bool, grace_s: float | None) -> bool:
        """Adds an order to a session; returns False if it has ended."""
        return await self._database.fetch_row("order_runner", session_id, slots, drains, grace_s) is not None

    async def pending(self) -> list[tuple[UUID, RunnerOrdered]]:
        """Returns the sessions with unconfirmed orders, and these; at most 10,000."""
        return [(row["id"], _order(row)) for row in await self._database.fetch("pending_orders", PENDING_READ)]

    async def confirm(self, session_id: UUID, number: int, *, load: bytes | None) -> None:
        """Records that a session's orders are confirmed up to a number, and its load unless that is None."""
        await self._database.fetch("confirm_order", session_id, number, load)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerView:
    """A live runner session. A renewal does not change it.

    Attributes:
        info: Its description of itself, opaque here.
        running: Number of attempts it runs.
        attempts: Names of the first of these attempts.
        load: Last reported load, opaque here; None if it reported none.
        load_history: Minutes and the first loads in them, oldest first; empty unless requested.
        ended: Number of its ended attempts.
        failed: Number of those that failed.
        project: Project of its token, or `projects/*`.
        order: Its last orders; None if there were none.
        is_order_pending: Whether it has not confirmed them.
    """

    session_id: UUID
    info: bytes
    opened_at: datetime.datetime
    lease_until: datetime.datetime = field(compare=False)
    running: int
    attempts: Sequence[str]
    load: bytes | None
    load_history: Sequence[tuple[datetime.datetime, bytes]] = ()
    ended: int
    failed: int
    project: str
    order: RunnerOrdered | None
    is_order_pending: bool
