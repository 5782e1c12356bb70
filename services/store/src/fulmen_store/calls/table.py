"""Recorded calls and their conversations in PostgreSQL.

Invariant: a project has at most `max_bytes` of contents, its newest calls; a transaction that adds or removes calls
of a project holds the lock of its sum, and a conversation has at least one call.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

import asyncpg

from fulmen_store.calls.calls import (
    CALLS,
    CONVERSATIONS,
    CallRecord,
    CallView,
    ConversationView,
    grouped,
    growths,
)
from fulmen_store.database.database import Database, Transaction
from fulmen_store.database.queries import CALL_FRAGMENTS, arguments
from fulmen_store.metrics import StoreMetrics
from fulmen_store.rollouts.filter import Expression
from fulmen_store.rollouts.filter_sql import compiled

__all__ = ["FIRST_PLACE", "CallTable", "ConversationPlace"]

MAX_CONTENT_BYTES: Final = 2 * 1024 * 1024

ConversationPlace = tuple[datetime.datetime, str]
"""Place of a conversation in their list: creation time and id."""

FIRST_PLACE: Final[ConversationPlace] = (datetime.datetime.max.replace(tzinfo=datetime.UTC), "")


class CallTable:
    """Reads, adds and removes recorded calls."""

    def __init__(self, database: Database, *, max_bytes: int, metrics: StoreMetrics) -> None:
        """Creates the table; a project may have `max_bytes` of contents."""
        self._database = database
        self._max_bytes = max_bytes
        self._metrics = metrics

    async def add(self, project_id: int, calls: Sequence[CallRecord]) -> None:
        """Adds calls of a project, in the order of their arrival; those that are known are left out."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_recorded", project_id)
            known = {row["id"] for row in await transaction.fetch("known_calls", [call.id for call in calls])}
            new = list({call.id: call for call in calls if call.id not in known}.values())
            if not new:
                return
            prefixes = list({prefix for call in new for prefix in call.prefixes})
            rows = await transaction.fetch("continued_conversations", project_id, prefixes) if prefixes else []
            new = grouped(new, {row["end_hash"]: row["conversation"] for row in rows})
            added = growths(new)
            await transaction.fetch(
                "add_conversations", project_id, [each.id for each in added], [each.model for each in added],
                [each.call_count for each in added], [each.created_at for each in added],
                [each.updated_at for each in added],
            )  # fmt: skip
            await transaction.fetch("add_calls", project_id, *arguments("calls/calls.sql", "call", new))
            size_bytes = await self._resized(transaction, project_id, sum(call.size_bytes for call in new))
            evicted = 0
            while size_bytes > self._max_bytes:
                rows = await transaction.fetch("remove_oldest_calls", project_id, size_bytes - self._max_bytes)
                if not rows:
                    break  # the sum is wrong, which no loop makes right
                evicted += len(rows)
                size_bytes = await self._settle(transaction, project_id, rows)
        self._metrics.calls_recorded(len(new))
        self._metrics.calls_evicted(evicted)

    async def page(
        self, project_id: int, *, where: Expression | None, before: UUID, limit: int, with_content: bool
    ) -> list[CallView]:
        """Returns calls that `where` selects, newest first, with ids below `before`; at most `limit`.

        With their texts they are fewer, as soon as these have about 2 MiB; one at least.
        """
        condition, values = compiled(where, first=4, schema=CALLS, fragments=CALL_FRAGMENTS)
        rows = await self._database.fetch_filtered("list_calls", condition, project_id, before, limit, *values)
        views = [CallView(**row) for row in rows]
        return await self._filled(project_id, views) if with_content else views

    async def get(self, project_id: int, call_id: UUID) -> CallView | None:
        """Returns a call with its texts; None if there is none."""
        row = await self._database.fetch_row("get_call", project_id, call_id)
        found = [] if row is None else await self._filled(project_id, [CallView(**row)])
        return found[0] if found else None

    async def conversations(
        self, project_id: int, *, where: Expression | None, before: ConversationPlace, limit: int
    ) -> list[ConversationView]:
        """Returns conversations that `where` selects, newest first, below a place."""
        condition, values = compiled(where, first=5, schema=CONVERSATIONS, fragments=CALL_FRAGMENTS)
        rows = await self._database.fetch_filtered("list_conversations", condition, project_id, *before, limit, *values)
        return [ConversationView(**row) for row in rows]

    async def rate(
        self, project_id: int, conversation: str, *, score: float | None, label: str
    ) -> ConversationView | None:
        """Sets score and label of a conversation; returns None if there is none."""
        row = await self._database.fetch_row("rate_conversation", project_id, conversation, score, label)
        return None if row is None else ConversationView(**row)

    async def remove(self, project_id: int, conversations: Sequence[str]) -> int:
        """Removes conversations; returns the number of their calls."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_recorded", project_id)
            rows = await transaction.fetch("remove_conversation_calls", project_id, list(conversations))
            await self._settle(transaction, project_id, rows)
        return len(rows)

    async def expired_projects(self) -> list[int]:
        """Returns the projects with expired calls."""
        return [row["project_id"] for row in await self._database.fetch("projects_with_expired_calls")]

    async def remove_expired(self, project_id: int, limit: int) -> int:
        """Removes at most `limit` expired calls of a project; returns their number."""
        async with self._database.transaction() as transaction:
            await transaction.fetch("lock_recorded", project_id)
            rows = await transaction.fetch("remove_expired_calls", project_id, limit)
            await self._settle(transaction, project_id, rows)
        return len(rows)

    async def _filled(self, project_id: int, views: Sequence[CallView]) -> list[CallView]:
        """Returns the first of these calls with their texts, as many as fit; leaves out those removed meanwhile."""
        kept: list[CallView] = []
        size_bytes = 0
        for view in views:
            size_bytes += view.size_bytes
            if kept and size_bytes > MAX_CONTENT_BYTES:
                break
            kept.append(view)
        rows = await self._database.fetch("call_contents", project_id, [view.id for view in kept])
        contents = {row["id"]: row["content"] for row in rows}
        # One that is removed meanwhile stays, without its texts: a page that ends with it knows where the next begins.
        return [replace(view, content=contents.get(view.id)) for view in kept]

    async def _settle(self, transaction: Transaction, project_id: int, removed: Sequence[asyncpg.Record]) -> int:
        """Accounts for removed calls; returns the bytes of the project's calls."""
        if removed:
            conversations = list({row["conversation"] for row in removed})
            await transaction.fetch("settle_conversations", project_id, conversations)
        return await self._resized(transaction, project_id, -sum(row["size_bytes"] for row in removed))

    async def _resized(self, transaction: Transaction, project_id: int, by_bytes: int) -> int:
        row = await transaction.fetch_row("set_recorded_size", project_id, by_bytes)
        assert row is not None
        return row["size_bytes"]
