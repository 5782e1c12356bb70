"""Background roles: delete what is past its retention, in batches, and create the partitions of coming days.

Invariants: live rollouts and projects without a retention keep everything. A rollout is kept for the retention of
its project, counted from its end. One replica removes rollouts at a time.
"""

from __future__ import annotations

import asyncio
import datetime
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from fulmen.errors import BlobStorageUnavailable, DatabaseUnavailable
from fulmen_store.calls.responses import StoredResponseTable
from fulmen_store.calls.table import CallTable
from fulmen_store.clock import Clock
from fulmen_store.retention.table import AGED, RetentionTable, UpkeepTable
from fulmen_store.spans.blob_refs import BlobRef, day_folder, span_folder
from fulmen_store.spans.blobs import Blobs
from fulmen_store.usage.table import UsageTable

__all__ = ["AgeRetention", "Maintenance", "RecordRetention", "Retention", "UsageRetention"]

INTERVAL_S: Final = 3600.0
RETRY_S: Final = 60.0
ROLLOUTS_PER_BATCH: Final = 500
RECORDS_PER_BATCH: Final = 500
DAYS_AHEAD: Final = 30
# Of narrow tables.
ROWS_PER_BATCH: Final = 5000
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
    """Creates the partitions of coming days, once an hour.

    Nothing waits for it: the month ahead is made in time, and spans of a day that is missing create it themselves.
    """

    def __init__(self, *, table: UpkeepTable, clock: Clock | None = None) -> None:
        self._table = table
        self._clock = clock or Clock()

    async def run_once(self) -> None:
        """Creates the partitions from yesterday on.

        Raises:
            DatabaseUnavailable: If the database is unavailable, or a partition cannot be created now.
        """
        for ahead in range(-1, DAYS_AHEAD + 1):
            await self._table.create_partition(self._clock.utc_today() + datetime.timedelta(days=ahead))


class AgeRetention(_Hourly):
    """Deletes what expires by its age, such as request ids and tokens, once an hour."""

    def __init__(self, *, table: UpkeepTable) -> None:
        self._table = table

    async def run_once(self) -> None:
        """Deletes all that has expired."""
        for kind in AGED:
            await _in_batches(partial(self._table.delete_aged, kind), ROWS_PER_BATCH)


class UsageRetention(_Hourly):
    """Deletes expired usage, once an hour."""

    def __init__(self, *, table: UsageTable) -> None:
        self._table = table

    async def run_once(self) -> None:
        """Deletes all expired usage."""
        await _in_batches(self._table.delete_expired, ROWS_PER_BATCH)


class RecordRetention(_Hourly):
    """Deletes expired recorded calls, with the conversations that have no others, or stored responses, once an hour."""

    def __init__(self, *, table: CallTable | StoredResponseTable) -> None:
        self._table = table

    async def run_once(self) -> None:
        """Deletes all that has expired, project by project."""
        for project_id in await self._table.expired_projects():
            await _in_batches(partial(self._table.remove_expired, project_id), RECORDS_PER_BATCH)


class Retention(_Hourly):
    """Removes expired rollouts with their spans, once an hour."""

    def __init__(self, *, table: RetentionTable, blobs: Blobs | None, clock: Clock | None = None) -> None:
        """Creates the role; without blob storage `blobs` is None."""
        self._table = table
        self._blobs = blobs
        self._clock = clock or Clock()

    async def run_once(self) -> None:
        """Drops whole days first, which is cheap, and removes the remaining rows of other days in batches."""
        for day in await self._table.days_past_retention(self._clock.utc_today()):
            if not await self._table.is_expired(day):
                continue
            if not await self._table.drop_day(day):
                # So are the others, and transactions that add spans wait behind each try.
                _log.info("retention_day_in_use", day=day.isoformat())
                break
            _log.info("retention_dropped_day", day=day.isoformat())
            await self._remove_day_of_blobs(day)
        expiring = await self._table.expiring_projects()
        for project_id in expiring:
            await self._remove_rows(project_id)
            await _in_batches(partial(self._table.remove_groups, project_id), ROWS_PER_BATCH)
            await _in_batches(partial(self._table.remove_names, project_id), ROWS_PER_BATCH)
        await self._remove_retries()

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

    async def _remove_retries(self) -> None:
        page = UUID(int=0), ROWS_PER_BATCH
        while page[1] == ROWS_PER_BATCH:
            page = await self._table.remove_retries(after=page[0], limit=ROWS_PER_BATCH) or (page[0], 0)
            await asyncio.sleep(PAUSE_S)

    async def _remove_day_of_blobs(self, day: datetime.date) -> None:
        if self._blobs is None:
            return
        try:
            async with asyncio.timeout(FOLDER_LIMIT_S):
                await self._blobs.remove_folder(day_folder(day))
        except TimeoutError:
            raise BlobStorageUnavailable("A day's payloads could not be removed in time.", day=day) from None


async def _in_batches(remove: Callable[[int], Awaitable[int]], limit: int) -> None:
    """Removes rows, at most `limit` of a kind at a time, until fewer were removed; with pauses in favor of other
    statements."""
    removed = limit
    while removed >= limit:
        removed = await remove(limit)
        await asyncio.sleep(PAUSE_S)
