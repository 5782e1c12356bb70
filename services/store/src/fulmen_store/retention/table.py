"""Removal of expired rows from PostgreSQL."""

from __future__ import annotations

import datetime
from typing import Final
from uuid import UUID

from fulmen_store.database.database import Database
from fulmen_store.database.days import require_partitions
from fulmen_store.segments.table import remove_extents

__all__ = [
    "AGED",
    "RemovedBatch",
    "RetentionTable",
    "UpkeepTable",
]

# "fulmer" in ASCII: the advisory lock of retention.
LOCK_KEY: Final = 0x66756C6D6572
# Statements that delete rows past an age.
AGED: Final = {
    "requests": "delete_expired_requests",
    "lost runners": "delete_old_lost_runners",
    "tokens": "delete_expired_tokens",
    "ended sessions": "delete_ended_sessions",
    "usage of processes": "delete_usage_instances",
    "rate-limit windows": "delete_windows",
    "training runs": "remove_expired_runs",
    "accounts of proxies": "delete_old_accounts",
    "proxies": "delete_old_proxies",
    "audit entries": "delete_old_audit_entries",
    "audit entries over the limit": "delete_surplus_audit_entries",
}


class RetentionTable:
    """Removes expired rows. Does nothing while another replica holds the lock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def days_past_retention(self, before: datetime.date) -> list[datetime.date]:
        """Returns the days before a date that have a partition and that a project no longer needs, oldest first."""
        return [row["day"] for row in await self._database.fetch("days_past_retention", before)]

    async def is_expired(self, day: datetime.date) -> bool:
        """Returns whether no project needs a day any more."""
        row = await self._database.fetch_row("day_is_expired", day)
        return row is not None and row["is_expired"]

    async def drop_day(self, day: datetime.date) -> bool:
        """Drops a day's partition unless the day is still needed, or the table in use; returns whether it did."""
        async with self._database.transaction() as transaction:
            lock = await transaction.fetch_row("lock_retention", LOCK_KEY)
            if lock is None or not lock["is_mine"]:
                return False
            row = await transaction.fetch_row("drop_expired_partition", day)
            return row is not None and row["is_dropped"]

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

    async def remove_names(self, project_id: int, limit: int) -> int:
        """Removes at most `limit` names of each kind that no rollout of a project has; returns their number."""
        runs = await self._database.fetch("remove_runs", project_id, limit)
        return len(runs) + len(await self._database.fetch("remove_names", project_id, limit))

    async def remove_retries(self, *, after: UUID, limit: int) -> tuple[UUID, int] | None:
        """Removes records of retries of deleted rollouts, of at most `limit` retries with ids above `after`.

        Returns the last id that was read and their number; None if there are none.
        """
        row = await self._database.fetch_row("remove_retries", after, limit)
        return None if row is None else (row["rollout_id"], row["seen"])

    async def remove_batch(self, project_id: int, limit: int) -> RemovedBatch:
        """Removes at most `limit` expired rollouts of a project, in one commit."""
        async with self._database.transaction() as transaction:
            lock = await transaction.fetch_row("lock_retention", LOCK_KEY)
            if lock is None or not lock["is_mine"]:
                return [], []
            ids = [row["rollout_id"] for row in await transaction.fetch("expired_rollouts", project_id, limit)]
            if not ids:
                return [], []
            chunks = await transaction.fetch_of_days("remove_chunks", ids, ids)
            await remove_extents(transaction, ids)
            for name in (
                "remove_attempts",
                "remove_ends",
                "remove_rollout_usage",
                "remove_rollouts",
                "remove_annotations",
                "remove_effects",
            ):
                await transaction.fetch(name, ids)
        return ids, [(row["rollout_id"], row["blob"], row["blob_size"]) for row in chunks if row["blob"] is not None]


class UpkeepTable:
    """Creates the partitions of coming days, and deletes what expires by its age."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_partition(self, day: datetime.date) -> None:
        """Creates a day's partition; does nothing if it exists.

        Raises:
            DatabaseUnavailable: If it cannot be created now.
        """
        require_partitions(await self._database.fetch("create_partition", day))

    async def delete_aged(self, kind: str, limit: int) -> int:
        """Deletes at most `limit` rows of one of the kinds in `AGED`; returns their number."""
        return len(await self._database.fetch(AGED[kind], limit))


RemovedBatch = tuple[list[UUID], list[tuple[UUID, bytes, int]]]
"""Removed rollouts; and for each payload that was stored as a blob: rollout, digest and size in bytes."""
