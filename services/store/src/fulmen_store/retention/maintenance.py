"""Background role: makes the coming days' partitions and forgets old request ids."""

from __future__ import annotations

import asyncio
import datetime
from typing import Final

from fulmen.errors import DatabaseUnavailable
from fulmen_store.clock import Clock
from fulmen_store.retention.table import UpkeepTable

__all__ = [
    "Maintenance",
]

DAYS_AHEAD: Final = 3
INTERVAL_S: Final = 3600.0
RETRY_S: Final = 1.0


class Maintenance:
    """Keeps the tables ready, once an hour."""

    def __init__(self, *, table: UpkeepTable, clock: Clock | None = None) -> None:
        self._table = table
        self._clock = clock or Clock()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            try:
                await self.run_once()
            except DatabaseUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            await asyncio.sleep(INTERVAL_S)

    async def run_once(self) -> None:
        """Creates the partitions of today and the next days, and forgets old requests."""
        for ahead in range(DAYS_AHEAD + 1):
            await self._table.create_partitions(self._clock.utc_today() + datetime.timedelta(days=ahead))
        await self._table.forget_requests()
