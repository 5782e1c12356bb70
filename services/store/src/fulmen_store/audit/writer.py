"""Background role: writes the lines of the audit log into the database, where people read them.

Calls do not wait for it, and a replica that is killed loses the entries that it has not written, up to half a second: the
audit file has all. What does not fit is counted in the next entry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen_store.audit.entries import Entry, entry_of
from fulmen_store.audit.table import AuditTable

__all__ = ["AuditWriter"]

WRITE_EVERY_S: Final = 0.5
BATCH: Final = 500
MAX_PENDING: Final = 10_000
LAST_WRITE_LIMIT_S: Final = 2.0

_log = structlog.get_logger()


class AuditWriter:
    """Keeps lines until they are written."""

    def __init__(self, table: AuditTable) -> None:
        self._table = table
        self._pending: deque[Entry] = deque()
        self._dropped = 0

    def note(self, line: Mapping[str, Any]) -> None:
        """Takes a line of the audit log."""
        if len(self._pending) >= MAX_PENDING:
            if not self._dropped:
                _log.error("audit_entries_dropped", pending=len(self._pending))
            self._dropped += 1
            return
        self._pending.append(entry_of(line).with_more_left_out(self._dropped))
        self._dropped = 0

    async def run(self) -> None:
        """Writes until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(WRITE_EVERY_S)
                await self._try_to_write()
        finally:
            try:
                async with asyncio.timeout(LAST_WRITE_LIMIT_S):
                    await self._try_to_write()
            except TimeoutError:
                _log.error("audit_entries_dropped", pending=len(self._pending))

    async def write_once(self) -> None:
        """Writes what is pending.

        Raises:
            DatabaseUnavailable: If it cannot be written now; it stays pending.
        """
        while self._pending:
            batch = [self._pending[place] for place in range(min(BATCH, len(self._pending)))]
            await self._table.add(batch)
            for _ in batch:
                self._pending.popleft()

    async def _try_to_write(self) -> None:
        try:
            await self.write_once()
        except DatabaseUnavailable as error:
            _log.warning("audit_entries_postponed", reason=error.reason, pending=len(self._pending))
