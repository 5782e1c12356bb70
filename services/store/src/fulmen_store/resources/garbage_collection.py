"""Background role: removes expired versions that are not in use.

Invariant: a version is never removed while an alias points to it, an existing version depends on it, or a live rollout
uses it. Foreign keys guarantee this; this role only finds candidates. Any number of replicas may run it.
docs/decisions/0007 explains why this is safe while rollouts are being created.
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Final
from uuid import UUID

import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen_store.resources.table import GarbageTable, UseKey
from fulmen_store.resources.versions import VersionKey

__all__ = [
    "ResourceGarbageCollector",
]

PAGE: Final = 500
USES_PER_BATCH: Final = 200
USES_PER_PAGE: Final = 5000
# Rounds between two passes over all uses, which keep the table of uses small.
ROUNDS_PER_WALK: Final = 60
INTERVAL_S: Final = 60.0
RETRY_S: Final = 1.0

FIRST_POSITION: Final = (datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), 0, 0)
FIRST_USE: Final[UseKey] = (0, 0, UUID(int=0))

_log = structlog.get_logger()


class ResourceGarbageCollector:
    """Removes expired versions that are not in use."""

    def __init__(self, table: GarbageTable) -> None:
        self._table = table

    async def run(self) -> None:
        """Collects until cancelled."""
        rounds = 0
        while True:
            try:
                await self.collect()
                if rounds % ROUNDS_PER_WALK == 0:
                    await self.delete_ended_uses()
            except DatabaseUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            rounds += 1
            await asyncio.sleep(INTERVAL_S)

    async def collect(self) -> int:
        """Removes all removable versions; returns their number."""
        total = 0
        # A removed version may have been the last dependent of another one.
        while removed := await self._pass():
            total += removed
        if total:
            _log.info("resource_versions_removed", count=total)
        return total

    async def delete_ended_uses(self) -> None:
        """Deletes every use by a rollout that has ended."""
        position: UseKey = FIRST_USE
        while (found := await self._table.delete_ended_uses(after=position, limit=USES_PER_PAGE)) is not None:
            position, seen = found
            if seen < USES_PER_PAGE:
                break

    async def _pass(self) -> int:
        position, removed = FIRST_POSITION, 0
        while True:
            page = await self._table.expired(after=position, limit=PAGE)
            candidates = [one.key for one in page if not one.referred_to and not await self._is_used(one.key)]
            if candidates:
                removed += len(await self._table.remove(candidates))
            if len(page) < PAGE:
                return removed
            position = (page[-1].expired_at, *page[-1].key)

    async def _is_used(self, key: VersionKey) -> bool:
        while True:
            seen, live = await self._table.delete_ended_uses_of(key, limit=USES_PER_BATCH)
            if live:
                return True
            if seen < USES_PER_BATCH:
                return False
