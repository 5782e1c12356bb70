"""Background role: removes usage that its project no longer keeps, and processes that are long gone."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from fulmen.errors import DatabaseUnavailable
from fulmen_store.periodic import Pace

__all__ = ["OldUsageTable", "UsageKeeper"]

INTERVAL_S: Final = 3600.0
RETRY_S: Final = 60.0
ROWS_PER_BATCH: Final = 5000
# Between two batches others get their turn.
PAUSE_S: Final = 0.05


class OldUsageTable(Protocol):
    """What can be forgotten."""

    async def forget_usage(self, limit: int) -> int:
        """Removes so many rows at most, of each kind, that are past the retention of their project; returns how many."""
        ...

    async def forget_instances(self) -> None:
        """Removes processes that were not heard of for a day."""
        ...


class UsageKeeper:
    """Forgets what is past its time, once an hour."""

    def __init__(self, *, table: OldUsageTable) -> None:
        """Takes the table."""
        self._table = table

    async def run(self) -> None:
        """Works until it is cancelled."""
        hourly, soon = Pace(INTERVAL_S), Pace(RETRY_S)
        while True:
            try:
                await self.work_once()
            except DatabaseUnavailable:
                await soon.next()
                continue
            await hourly.next()

    async def work_once(self) -> None:
        """Forgets everything that is past its time now.

        Raises:
            DatabaseUnavailable: if the database is away.
        """
        await self._table.forget_instances()
        removed = ROWS_PER_BATCH
        while removed >= ROWS_PER_BATCH:
            removed = await self._table.forget_usage(ROWS_PER_BATCH)
            await asyncio.sleep(PAUSE_S)
