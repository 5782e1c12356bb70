"""Background roles: delete what is past its retention, and create the partitions of coming days.

Invariants: live rollouts and projects without a retention keep everything. A rollout is kept for the retention of
its project, counted from its end. One replica removes rollouts at a time.
"""

from __future__ import annotations

import asyncio
import datetime
from abc import ABC, abstractmethod
from typing import Final

import structlog

from fulmen.errors import BlobStorageUnavailable, DatabaseUnavailable
from fulmen_store.calls.table import CallTable
from fulmen_store.clock import Clock
from fulmen_store.retention.table import RetentionTable, UpkeepTable
from fulmen_store.spans.blob_refs import BlobRef, day_folder, span_folder
from fulmen_store.spans.blobs import Blobs
from fulmen_store.usage.table import UsageTable

__all__ = ["CallRetention", "Maintenance", "Retention", "UsageRetention"]

INTERVAL_S: Final = 3600.0
RETRY_S: Final = 60.0
ROLLOUTS_PER_BATCH: Final = 500
GROUPS_PER_BATCH: Final = 5000
USAGE_ROWS_PER_BATCH: Final = 5000
CALLS_PER_BATCH: Final = 500
DAYS_AHEAD: Final = 3
# Pause between batches, in favor of other statements.
PAUSE_S: Final = 0.05
FOLDER_LIMIT_S: Final = 600.0


_log = structlog.get_logger()


class _Hourly(ABC):
    """Works once an hour; a failed pass is repeated after `retry_s` seconds."""

    retry_s = RETRY_S

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            try:
                await self.run_once()
            except (DatabaseUnavailable, BlobStorageUnavailable) as error:
                _log.warning("retention_postponed", reason=error.reason)
                await asyncio.sleep(self.retry_s)
                continue
            await asyncio.sleep(INTERVAL_S)

    @abstractmethod
    async def run_once(self) -> None:
        """Makes one pass.

        Raises:
            DatabaseUnavailable: If the database is unavailable.
            BlobStorageUnavailable: If blobs could not be removed.
        """


class Maintenance(_Hourly):
    """Creates the partitions of coming days and deletes expired requests and tokens, once an hour."""

    retry_s = 1.0

    def __init__(self, *, table: UpkeepTable, clock: Clock | None = None) -> None:
        self._table = table
        self._clock = clock or Clock()

    async def run_once(self) -> None:
        """Creates the partitions of today and the next days, and deletes expired requests and tokens."""
        for ahead in range(DAYS_AHEAD + 1):
            await self._table.create_partitions(self._clock.utc_today() + datetime.timedelta(days=ahead))
        await self._table.delete_expired_requests()


class UsageRetention(_Hourly):
    """Deletes expired usage, and proxy processes not seen for a day, once an hour."""

    def __init__(self, *, table: UsageTable) -> None:
        self._table = table

    async def run_once(self) -> None:
        """Deletes all expired usage and stale proxy processes."""
        await self._table.delete_stale_instances()
        removed = USAGE_ROWS_PER_BATCH
        while removed >= USAGE_ROWS_PER_BATCH:
            removed = await self._table.delete_expired(USAGE_ROWS_PER_BATCH)
            await asyncio.sleep(PAUSE_S)


class CallRetention(_Hourly):
    """Deletes expired recorded calls, once an hour."""

    def __init__(self, *, table: CallTable) -> None:
        self._table = table

    async def run_once(self) -> None:
        """Deletes all expired calls, with the conversations that have no others."""
        for project_id in await self._table.expired_projects():
            removed = CALLS_PER_BATCH
            while removed == CALLS_PER_BATCH:
                removed = await self._table.remove_expired(project_id, CALLS_PER_BATCH)
                await asyncio.sleep(PAUSE_S)


class Retention(_Hourly):
    """Removes expired rollouts with their spans, once an hour."""

    def __init__(self, *, table: RetentionTable, blobs: Blobs | None, clock: Clock | None = None) -> None:
        """Creates the role; without blob storage `blobs` is None."""
        self._table = table
        self._blobs = blobs
        self._clock = clock or Clock()

    async def run_once(self) -> None:
        """Drops whole days first, which is cheap, and removes the remaining rows of other days in batches."""
        for day in await self._table.expired_days(self._clock.utc_today()):
            if not await self._table.drop_day(day):
                _log.info("retention_day_in_use", day=day.isoformat())
                continue
            _log.info("retention_dropped_day", day=day.isoformat())
            await self._remove_day_of_blobs(day)
        expiring = await self._table.expiring_projects()
        for project_id in expiring:
            await self._remove_rows(project_id)
            await self._remove_groups(project_id)

    async def _remove_rows(self, project_id: int) -> None:
        removed = 0
        while True:
            rollouts, payloads = await self._table.remove_batch(project_id, ROLLOUTS_PER_BATCH)
            if payloads and self._blobs is not None:
                await self._blobs.remove(
                    [
                        BlobRef(folder=span_folder(rollout_id), digest=digest, size_bytes=size_bytes)
                        for rollout_id, digest, size_bytes in payloads
                    ]
                )
            removed += len(rollouts)
            if len(rollouts) < ROLLOUTS_PER_BATCH:
                break
            await asyncio.sleep(PAUSE_S)
        if removed:
            _log.info("retention_removed_rollouts", project_id=project_id, count=removed)

    async def _remove_groups(self, project_id: int) -> None:
        removed = GROUPS_PER_BATCH
        while removed == GROUPS_PER_BATCH:
            removed = await self._table.remove_groups(project_id, GROUPS_PER_BATCH)
            await asyncio.sleep(PAUSE_S)

    async def _remove_day_of_blobs(self, day: datetime.date) -> None:
        if self._blobs is None:
            return
        try:
            async with asyncio.timeout(FOLDER_LIMIT_S):
                await self._blobs.remove_folder(day_folder(day))
        except TimeoutError:
            raise BlobStorageUnavailable("A day's payloads could not be removed in time.", day=day) from None
