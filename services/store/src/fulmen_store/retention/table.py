"""Removal of expired rows from PostgreSQL."""

from __future__ import annotations

import datetime
from typing import Final
from uuid import UUID

from fulmen_store.database.database import Database

__all__ = [
    "RemovedBatch",
    "RetentionTable",
    "UpkeepTable",
]

# "fulmer" in ASCII: the advisory lock of retention.
LOCK_KEY: Final = 0x66756C6D6572
# In this order: everything else is reached through `rollout`.
TABLES: Final = ("rollout", "attempt", "rollout_end", "span_chunk")


class RetentionTable:
    """Removes expired rows. Does nothing while another replica holds the lock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def expired_days(self, before: datetime.date) -> list[datetime.date]:
        """Returns the days before a date that have partitions and that all projects have expired, oldest first."""
        return [row["day"] for row in await self._database.fetch("expired_days", before)]

    async def drop_day(self, day: datetime.date) -> bool:
        """Drops a day's partitions unless the day is still needed; returns whether all are gone.

        One table per commit: readers hold locks on several.
        """
        dropped = False
        for table in TABLES:
            async with self._database.transaction() as transaction:
                lock = await transaction.fetch_row("lock_retention", LOCK_KEY)
                if lock is None or not lock["is_mine"]:
                    return False
                row = await transaction.fetch_row("drop_expired_partition", table, day)
                dropped |= row is not None and row["is_dropped"]
                left = await transaction.fetch_row("has_partition", table, day)
                if left is None or left["has"]:
                    return False
        return dropped

    async def expiring_projects(self) -> list[int]:
        """Returns the projects that have a retention."""
        return [row["id"] for row in await self._database.fetch("expiring_projects")]

    async def remove_groups(self, project_id: int, limit: int) -> int:
        """Removes at most `limit` groups of a project that are older than its oldest rollout; returns their number."""
        async with self._database.transaction() as transaction:
            lock = await transaction.fetch_row("lock_retention", LOCK_KEY)
            if lock is None or not lock["is_mine"]:
                return 0
            await transaction.fetch_row("allow_bitmaps")
            return len(await transaction.fetch("remove_groups", project_id, limit))

    async def remove_batch(self, project_id: int, limit: int) -> RemovedBatch:
        """Removes at most `limit` expired rollouts of a project, in one commit."""
        async with self._database.transaction() as transaction:
            lock = await transaction.fetch_row("lock_retention", LOCK_KEY)
            if lock is None or not lock["is_mine"]:
                return [], []
            ids = [row["rollout_id"] for row in await transaction.fetch("expired_rollouts", project_id, limit)]
            if not ids:
                return [], []
            chunks = await transaction.fetch("remove_chunks", ids)
            for name in ("remove_attempts", "remove_ends", "remove_rollouts"):
                await transaction.fetch(name, ids)
        return ids, [(row["rollout_id"], row["blob"], row["blob_size"]) for row in chunks if row["blob"] is not None]


class UpkeepTable:
    """Creates the partitions of coming days and deletes expired requests and tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_partitions(self, day: datetime.date) -> None:
        """Creates one day's partitions; does nothing for those that exist."""
        await self._database.fetch("create_partitions", day)

    async def delete_expired_requests(self) -> None:
        """Removes request ids and lost runners older than 24 hours, and expired tokens."""
        await self._database.fetch("delete_expired_requests")
        await self._database.fetch("delete_old_lost_runners")
        await self._database.fetch("delete_expired_tokens")


RemovedBatch = tuple[list[UUID], list[tuple[UUID, bytes, int]]]
"""Removed rollouts; and for each payload that was stored as a blob: rollout, digest and size in bytes."""
