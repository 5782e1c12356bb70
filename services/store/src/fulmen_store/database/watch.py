"""Background role: detects whether PostgreSQL is available.

It probes once a second, and immediately after a failed statement, over its own connection. While PostgreSQL does not
answer or is read-only, everything in progress and every statement fails immediately, until a new pool is open: a pool that
outlives its server holds connections in an unknown state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import asyncpg
import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen_store.database.connections import HOT_SETTINGS, mapped_errors, open_pool
from fulmen_store.database.database import Database

__all__ = ["DatabaseWatch"]

PROBE_INTERVAL_S: Final = 1.0
PROBE_LIMIT_S: Final = 2.0
# Between two probes, even if every statement fails.
MIN_PAUSE_S: Final = 0.1
RETRY_PAUSE_S: Final = 0.2
PROBES: Final = 3

_log = structlog.get_logger()


class DatabaseWatch:
    """Watches the database and opens a new pool once it is available again."""

    def __init__(
        self,
        *,
        database: Database,
        dsn: str,
        connections: int,
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """Creates the role.

        Args:
            database: Database whose pool is replaced.
            dsn: Connection URL.
            connections: Maximum number of connections of a pool.
            changed: Called at the start and whenever availability changes.
        """
        self._database = database
        self._dsn = dsn
        self._connections = connections
        self._changed = changed
        self._own: Any = None

    async def run(self) -> None:
        """Watches until cancelled."""
        await self._changed()
        try:
            while True:
                await self._until_lost()
                await self._until_back()
        finally:
            self._drop()

    async def _until_lost(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await self._database.suspected.wait()
            except TimeoutError:
                pass
            self._database.suspected.clear()
            try:
                await self._probe()
            except DatabaseUnavailable as error:
                if isinstance(error.__cause__, TimeoutError) and self._answers_others():
                    continue
                self._database.lose()
                _log.error("database_lost", reason=_reason(error))
                await self._changed()
                return
            await asyncio.sleep(MIN_PAUSE_S)

    def _answers_others(self) -> bool:
        """Returns True if statements were answered but the probe was not: PostgreSQL or this process is only slow."""
        return time.monotonic() - self._database.answered_at < PROBE_LIMIT_S

    async def _until_back(self) -> None:
        since = time.monotonic()
        while True:
            try:
                await self._ask()
                pool = await open_pool(self._dsn, connections=self._connections, limit_s=PROBE_LIMIT_S)
            except DatabaseUnavailable:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            self._database.suspected.clear()
            self._database.regain(pool)
            _log.warning("database_back", away_s=round(time.monotonic() - since, 3))
            await self._changed()
            return

    async def _probe(self) -> None:
        """Probes over its own connection, then a new one, then one of the pool if the server accepts no more.

        Raises:
            DatabaseUnavailable: If none of them is answered.
        """
        for left in reversed(range(PROBES)):
            is_new = self._own is None
            try:
                await self._ask()
            except DatabaseUnavailable as error:
                # Perhaps only this connection was closed, for example by an administrator; a stopped server accepts no new
                # one.
                if left and (not is_new or isinstance(error.__cause__, asyncpg.ConnectionDoesNotExistError)):
                    continue
                if not isinstance(error.__cause__, asyncpg.TooManyConnectionsError):
                    raise
                with mapped_errors():
                    async with asyncio.timeout(PROBE_LIMIT_S):
                        await self._database.look()
            return

    async def _ask(self) -> None:
        try:
            with mapped_errors():
                async with asyncio.timeout(PROBE_LIMIT_S):
                    if self._own is None:
                        self._own = await asyncpg.connect(
                            self._dsn, timeout=PROBE_LIMIT_S, server_settings=HOT_SETTINGS
                        )
                    await self._database.look(self._own)
        except DatabaseUnavailable:
            self._drop()
            raise

    def _drop(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.terminate()


def _reason(error: DatabaseUnavailable) -> str:
    return type(error.__cause__).__name__ if error.__cause__ is not None else "ReadOnly"
