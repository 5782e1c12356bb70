"""The registry's reads of runner sessions in PostgreSQL."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import asyncpg

from fulmen.ids import attempt_name
from fulmen_store.database.database import Database
from fulmen_store.projects.names import ProjectNames

__all__ = [
    "RunnerTable",
    "RunnerView",
]


class RunnerTable:
    """Reads live sessions and what they run."""

    def __init__(self, database: Database, projects: ProjectNames) -> None:
        self._database = database
        self._projects = projects

    async def page(self, *, after: UUID, limit: int, project: str | None) -> list[RunnerView]:
        """Returns live sessions that may serve a project, oldest first, with their attempts of it; None for all projects."""
        return await self._views(await self._database.fetch("list_runners", after, limit, project))

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
        ended=row["ended_count"],
        failed=row["failed_count"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerView:
    """A live runner session. A renewal does not change it.

    Attributes:
        info: Its description of itself, opaque here.
        running: Number of attempts it runs.
        attempts: Names of the first of these attempts.
        load: Last reported load, opaque here; None if it reported none.
        ended: Number of its ended attempts.
        failed: Number of those that failed.
    """

    session_id: UUID
    info: bytes
    opened_at: datetime.datetime
    lease_until: datetime.datetime = field(compare=False)
    running: int
    attempts: Sequence[str]
    load: bytes | None
    ended: int
    failed: int
