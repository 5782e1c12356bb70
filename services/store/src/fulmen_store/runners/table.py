"""The registry's reads of runner sessions in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import asyncpg

from fulmen_store.database.database import Database

__all__ = [
    "RunnerTable",
    "RunnerView",
]


class RunnerTable:
    """Implements `RunnerTable`, and the reads of the transport."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, *, after: UUID, limit: int, project: str | None) -> list[RunnerView]:
        """Returns live sessions that may serve a project, oldest first, with what they run of it; None: all."""
        return [_view(row) for row in await self._database.fetch("list_runners", after, limit, project)]

    async def find(self, session_id: UUID, *, project: str | None) -> RunnerView | None:
        """Returns one live session if it may serve a project, with what it runs of it; None: of all."""
        row = await self._database.fetch_row("find_runner", session_id, project)
        return None if row is None else _view(row)


def _view(row: asyncpg.Record) -> RunnerView:
    return RunnerView(
        session_id=row["id"],
        info=row["info"],
        opened_at=row["opened_at"],
        lease_until=row["lease_until"],
        running=row["running"],
        attempts=list(zip(row["rollouts"] or (), row["epochs"] or (), strict=True)),
        load=row["load"],
        ended=row["ended_count"],
        failed=row["failed_count"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerView:
    """A live runner session. That it was renewed is no change of it.

    Attributes:
        info: How it described itself, opaque here.
        running: Number of attempts it runs.
        attempts: First of them, as (rollout, epoch).
        load: Load that it last reported, opaque here; None if it never did.
        ended: Number of its ended attempts.
        failed: Number of those that failed.
    """

    session_id: UUID
    info: bytes
    opened_at: datetime.datetime
    lease_until: datetime.datetime = field(compare=False)
    running: int
    attempts: Sequence[tuple[UUID, int]]
    load: bytes | None
    ended: int
    failed: int
