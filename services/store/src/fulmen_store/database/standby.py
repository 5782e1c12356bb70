"""Reads from a standby of the database: lists and reports, never older than the call that asks for them.

A read asks the primary how far it has written, and the standby whether it has replayed that. If it has not in time, or is
away, the primary answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import asyncpg
import structlog
from opentelemetry import metrics

from fulmen.errors import DatabaseUnavailable
from fulmen_service_kit.security.auth import current_tenant
from fulmen_service_kit.security.fair_turns import FairSlots
from fulmen_store.database.connections import STATEMENT_LIMIT_S, mapped_errors, open_pool
from fulmen_store.database.queries import SQL

__all__ = ["READS", "Standby", "open_standby"]

READS: Final = "-- A standby may answer."
"""How statements begin that may run on a standby."""
CATCH_UP_LIMIT_S: Final = 0.5
CATCH_UP_POLL_S: Final = 0.005
PAUSE_S: Final = 5.0
"""How long a standby that was away or late is not asked, in seconds."""

_log = structlog.get_logger()


class Standby:
    """Answers reads if it can."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        size = pool.get_max_size()
        self._slots = FairSlots(size, share=max(1, size // 2))
        self._asked_again_at = 0.0
        self._reads = metrics.get_meter("fulmen.store").create_counter(
            "fulmen.store.standby.reads", description="Reads that a standby may answer, by the server that answered."
        )
        for server in ("primary", "standby"):
            self._reads.add(0, {"server": server})

    @property
    def is_asked(self) -> bool:
        """Whether it has been neither away nor late of late."""
        return time.monotonic() > self._asked_again_at

    async def fetch(self, statement: str, arguments: Sequence[object], *, position: str) -> list[asyncpg.Record] | None:
        """Runs a statement once everything up to a position of the primary is replayed; returns None if it cannot.

        Raises:
            ArgumentInvalid: For values that only the database can reject.
        """
        project = current_tenant()
        if project:
            await self._slots.take(project)
        try:
            with mapped_errors():
                async with self._pool.acquire(timeout=CATCH_UP_LIMIT_S) as connection:
                    if await self._has_replayed(connection, position):
                        rows: list[asyncpg.Record] = await connection.fetch(
                            statement, *arguments, timeout=STATEMENT_LIMIT_S
                        )
                        self._reads.add(1, {"server": "standby"})
                        return rows
            reason = "late"
        except DatabaseUnavailable as error:
            reason = type(error.__cause__).__name__
        finally:
            if project:
                self._slots.release(project)
        self._asked_again_at = time.monotonic() + PAUSE_S
        _log.warning("standby_not_asked", reason=reason, pause_s=PAUSE_S)
        return None

    def note_primary(self) -> None:
        """Counts a read that the primary answered instead."""
        self._reads.add(1, {"server": "primary"})

    def close(self) -> None:
        """Closes the connections."""
        self._pool.terminate()

    async def _has_replayed(self, connection: asyncpg.Connection, position: str) -> bool:
        until = time.monotonic() + CATCH_UP_LIMIT_S
        # Null, and so not replayed, if it is no longer a standby.
        while not await connection.fetchval(SQL["has_replayed"], position, timeout=CATCH_UP_LIMIT_S):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(CATCH_UP_POLL_S)
        return True


async def open_standby(dsn: str, *, connections: int) -> Standby:
    """Returns the standby at a URL, which may be away."""
    return Standby(await open_pool(dsn, connections=connections, min_connections=0, limit_s=CATCH_UP_LIMIT_S))
