"""Background role: removes expired usage, and proxy processes not seen for a day."""

from __future__ import annotations

import asyncio
from typing import Final

from fulmen.errors import DatabaseUnavailable
from fulmen_store.usage.table import UsageTable

__all__ = [
    "UsageRetention",
]

INTERVAL_S: Final = 3600.0
RETRY_S: Final = 60.0
ROWS_PER_BATCH: Final = 5000
# Pause between batches, in favour of other queries.
PAUSE_S: Final = 0.05


class UsageRetention:
    """Removes expired usage, once an hour."""

    def __init__(self, *, table: UsageTable) -> None:
        self._table = table

    async def run(self) -> None:
        """Removes expired usage until cancelled."""
        while True:
            try:
                await self.run_once()
            except DatabaseUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            await asyncio.sleep(INTERVAL_S)

    async def run_once(self) -> None:
        """Removes all expired usage and proxy processes.

        Raises:
            DatabaseUnavailable: If the database is unavailable.
        """
        await self._table.forget_instances()
        removed = ROWS_PER_BATCH
        while removed >= ROWS_PER_BATCH:
            removed = await self._table.forget_usage(ROWS_PER_BATCH)
            await asyncio.sleep(PAUSE_S)
