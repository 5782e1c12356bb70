"""Stored responses of the Responses API in PostgreSQL.

Invariant: a project has at most `max_bytes` of them, its newest ones; a transaction that adds or removes some of a
project holds the lock of its sum.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen_store.database.database import Database, Transaction
from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.database.queries import arguments
from fulmen_store.metrics import StoreMetrics

__all__ = ["NewResponse", "StoredResponseTable", "StoredResponseView"]

PAGE_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NewResponse:
    """A response to be stored.

    Attributes:
        attempt: The attempt whose key made it; empty for an app.
        input: Its own input items, JSON.
        size_bytes: What it counts towards the limit of its project.
        expires_at: When it expires; None if it is kept for the whole retention.
    """

    project_id: int
    id: UUID
    attempt: str
    previous_id: UUID | None
    input: bytes
    response: bytes
    size_bytes: int
    expires_at: datetime.datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponseView:
    """A stored response; `depth` and `chain_bytes` count all up to it."""

    id: UUID
    previous_id: UUID | None
    depth: int
    chain_bytes: int
    input: bytes
    response: bytes


class StoredResponseTable:
    """Reads, adds and removes stored responses."""

    def __init__(
        self, database: Database, *, max_bytes: int, retention: datetime.timedelta, metrics: StoreMetrics
    ) -> None:
        """Creates the table; a project may have `max_bytes` of responses, each for the retention."""
        self._database = database
        self._max_bytes = max_bytes
        self._retention = retention
        self._metrics = metrics
        self.committer: GroupCommitter[NewResponse, None] = GroupCommitter(
            "stored_responses", self._add_all, metrics=metrics
        )

    async def add(self, response: NewResponse) -> None:
        """Adds a response, unless its id is known."""
        await self.committer.submit([response], size_bytes=response.size_bytes)

    async def chain(self, project_id: int, response_id: UUID, attempt: str, limit: int) -> list[StoredResponseView]:
        """Returns a response and those before it, `limit` at most, as many as have 2 MiB; none if there is none."""
        rows = await self._database.fetch("stored_responses", project_id, response_id, attempt, limit, PAGE_BYTES)
        return [StoredResponseView(**row) for row in rows]

    async def remove(self, project_id: int, response_id: UUID, attempt: str) -> bool:
        """Removes a response; returns False if there is none."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_stored_responses", project_id)
            rows = await transaction.fetch("remove_stored_response", project_id, response_id, attempt)
            await self._resized(transaction, project_id, -sum(row["size_bytes"] for row in rows))
        return bool(rows)

    async def expired_projects(self) -> list[int]:
        """Returns the projects with expired responses."""
        return [row["project_id"] for row in await self._database.fetch("projects_with_expired_responses")]

    async def remove_expired(self, project_id: int, limit: int) -> int:
        """Removes at most `limit` expired responses of a project; returns their number."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_stored_responses", project_id)
            rows = await transaction.fetch("remove_expired_stored_responses", project_id, limit)
            await self._resized(transaction, project_id, -sum(row["size_bytes"] for row in rows))
        return len(rows)

    async def _add_all(self, responses: Sequence[NewResponse]) -> list[None]:
        # A project at a time: no transaction holds the locks of two.
        for project_id in {each.project_id for each in responses}:
            await self._add(project_id, [each for each in responses if each.project_id == project_id])
        return [None] * len(responses)

    async def _add(self, project_id: int, responses: Sequence[NewResponse]) -> None:
        evicted = 0
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_stored_responses", project_id)
            columns = arguments("calls/responses.sql", "response", responses)
            rows = await transaction.fetch("add_stored_responses", project_id, self._retention, *columns)
            added_bytes = sum(row["size_bytes"] for row in rows)
            size_bytes = await self._resized(transaction, project_id, added_bytes)
            while size_bytes > self._max_bytes:
                rows = await transaction.fetch(
                    "remove_oldest_stored_responses", project_id, size_bytes - self._max_bytes
                )
                if not rows:
                    break  # the sum is wrong, which no loop makes right
                evicted += len(rows)
                size_bytes = await self._resized(transaction, project_id, -sum(row["size_bytes"] for row in rows))
        self._metrics.responses_evicted(evicted)

    async def _resized(self, transaction: Transaction, project_id: int, by_bytes: int) -> int:
        row = await transaction.fetch_row("set_stored_response_size", project_id, by_bytes)
        assert row is not None
        return row["size_bytes"]
