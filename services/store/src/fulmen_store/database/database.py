"""The connections to PostgreSQL; maps its errors to the store's.

Invariant: while PostgreSQL is known to be unavailable, every statement fails immediately, including those in progress.
`DatabaseWatch` decides when it is unavailable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final
from uuid import UUID

import asyncpg
import structlog

from fulmen.errors import DatabaseUnavailable
from fulmen_service_kit.security.auth import current_tenant
from fulmen_service_kit.security.fair_turns import FairSlots
from fulmen_store.database.connections import CONNECT_LIMIT_S, STATEMENT_LIMIT_S, mapped_errors, open_pool
from fulmen_store.database.queries import SQL, filtered, is_by_day, of_days
from fulmen_store.database.server_clock import ServerClock
from fulmen_store.database.standby import READS, Standby, open_standby

__all__ = ["Database", "Row", "connect"]

Row = asyncpg.Record
"""A row of a result: its columns by name."""

ACQUIRE_LIMIT_S: Final = 10.0
RETRY_PAUSE_S: Final = 0.2
FREE_POLL_S: Final = 0.02
FULL_S: Final = 5.0
"""After a statement that found no space, the database counts as full."""

_log = structlog.get_logger()


class Database:
    """Runs named statements; each is one commit unless it runs inside `transaction`."""

    def __init__(self, pool: asyncpg.Pool, standby: Standby | None = None) -> None:
        """`standby` answers reads if it can; the database closes it."""
        self._pool: asyncpg.Pool | None = pool
        self._standby = standby
        # One is left for the store's own work.
        size = max(1, pool.get_max_size() - 1)
        self._slots = FairSlots(size, share=max(1, size // 2))
        self._under_way: set[asyncio.Timeout] = set()
        self.suspected = asyncio.Event()
        self.answered_at = time.monotonic()
        self.clock = ServerClock()
        self._full_until = 0.0

    @property
    def is_writable(self) -> bool:
        """Whether the database is up and recently had free space."""
        return self.is_up and time.monotonic() > self._full_until

    @property
    def is_up(self) -> bool:
        """Whether statements are sent to PostgreSQL; if not, they fail immediately."""
        return self._pool is not None

    def lose(self) -> None:
        """Fails all statements in progress, and every statement until `regain`."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()
        now = asyncio.get_running_loop().time()
        for limit in self._under_way:
            limit.reschedule(now)
        self._under_way = set()

    def regain(self, pool: asyncpg.Pool) -> None:
        """Sets a new pool once PostgreSQL is available again."""
        self._pool = pool

    async def look(self, connection: Any = None) -> None:
        """Checks whether the server is writable, and its time; over a connection of the pool if none is given.

        Raises:
            DatabaseUnavailable: If it is read-only or does not answer.
        """
        began = time.monotonic()
        name = "state_of_server"
        row = await (self.fetch_row(name) if connection is None else connection.fetchrow(SQL[name]))
        if row is None or row["is_read_only"]:
            raise DatabaseUnavailable("The store's database is read-only.")
        self.clock.observe(row["now_s"], took_s=time.monotonic() - began)

    async def clock_has_run_for(self, seconds: float) -> bool:
        """Looks at the server's clock; returns whether it was not set for so long, as far as this process has seen.

        Raises:
            DatabaseUnavailable: If it does not answer.
        """
        await self.look()
        return self.clock.has_run_for(seconds)

    async def fetch(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        """Runs a named statement and returns its rows.

        Raises:
            DatabaseUnavailable: If the outcome is unknown.
        """
        return await self._fetch(_undated(name), arguments)

    async def fetch_filtered(
        self, name: str, condition: str, *arguments: object, order: str = "", within: str = ""
    ) -> list[asyncpg.Record]:
        """Runs a named statement with a condition, and what else is given, in the places that are marked for them.

        Raises:
            DatabaseUnavailable: If the outcome is unknown.
        """
        return await self._fetch(filtered(name, condition, order, within), arguments)

    async def fetch_of_days(self, name: str, rollout_ids: Iterable[UUID], *arguments: object) -> list[asyncpg.Record]:
        """Runs a named statement over the days of these rollouts and returns its rows.

        Raises:
            DatabaseUnavailable: If the outcome is unknown.
        """
        return await self._fetch(of_days(name, rollout_ids), arguments)

    async def fetch_row(self, name: str, *arguments: object) -> asyncpg.Record | None:
        """Runs a named statement and returns its first row."""
        rows = await self.fetch(name, *arguments)
        return rows[0] if rows else None

    async def _fetch(self, statement: str, arguments: Sequence[object]) -> list[asyncpg.Record]:
        standby = self._standby if statement.startswith(READS) else None
        if standby is not None and standby.is_asked:
            [written] = await self.fetch("written_position")
            rows = await standby.fetch(statement, arguments, position=written["position"])
            if rows is not None:
                return rows
        async with self._connection() as connection:
            rows = await connection.fetch(statement, *arguments, timeout=STATEMENT_LIMIT_S)
        if standby is not None:
            standby.note_primary()
        return rows

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Runs several named statements in one commit."""
        async with self._connection() as connection, connection.transaction():
            yield Transaction(connection)

    async def close(self) -> None:
        """Closes the connections; waits briefly for statements in progress."""
        if self._standby is not None:
            self._standby.close()
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                await pool.close()
        except TimeoutError:
            pool.terminate()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        project = current_tenant()
        if project:
            await self._slots.take(project)
        pool = self._pool
        try:
            if pool is None:
                raise DatabaseUnavailable("The store's database is unavailable.")
            with mapped_errors():
                # Each part has a limit of its own; this one is set by `lose`.
                async with asyncio.timeout(None) as limit:
                    self._under_way.add(limit)
                    try:
                        connection = await self._acquire(pool)
                        try:
                            with _closed_if_confused(connection):
                                yield connection
                                self.answered_at = time.monotonic()
                        finally:
                            await pool.release(connection, timeout=ACQUIRE_LIMIT_S)
                    finally:
                        self._under_way.discard(limit)
        except DatabaseUnavailable as error:
            if pool is not None:
                self.suspected.set()
            if isinstance(error.__cause__, asyncpg.DiskFullError):
                self._note_full()
            raise
        finally:
            if project:
                self._slots.release(project)

    def _note_full(self) -> None:
        now = time.monotonic()
        if now > self._full_until:
            _log.error("database_full")
        self._full_until = now + FULL_S

    async def _acquire(self, pool: asyncpg.Pool) -> Any:
        deadline = time.monotonic() + ACQUIRE_LIMIT_S
        while True:
            try:
                return await pool.acquire(timeout=ACQUIRE_LIMIT_S)
            except asyncpg.TooManyConnectionsError:
                # The server has no room for one more, but those that are open become free.
                self.suspected.set()
                if not pool.get_size() or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(FREE_POLL_S)


class Transaction:
    """Runs named statements on one connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        """Runs a named statement and returns its rows."""
        return await self._connection.fetch(_undated(name), *arguments, timeout=STATEMENT_LIMIT_S)

    async def fetch_of_days(self, name: str, rollout_ids: Iterable[UUID], *arguments: object) -> list[asyncpg.Record]:
        """Runs a named statement over the days of these rollouts and returns its rows."""
        return await self._connection.fetch(of_days(name, rollout_ids), *arguments, timeout=STATEMENT_LIMIT_S)

    async def fetch_row(self, name: str, *arguments: object) -> asyncpg.Record | None:
        """Runs a named statement and returns its first row."""
        rows = await self.fetch(name, *arguments)
        return rows[0] if rows else None


async def connect(dsn: str, *, connections: int, start_limit_s: float, standby_dsn: str = "") -> Database:
    """Opens the pool; waits for a database that is still starting, but not for its standby.

    Args:
        dsn: Connection URL.
        standby_dsn: Connection URL of a standby that answers reads; empty for none.
        connections: Maximum number of connections.
        start_limit_s: How long to wait for the database, seconds.

    Raises:
        DatabaseUnavailable: If it did not answer in time.
    """
    deadline = time.monotonic() + start_limit_s
    while True:
        try:
            pool = await open_pool(dsn, connections=connections)
        except DatabaseUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_PAUSE_S)
        else:
            standby = await open_standby(standby_dsn, connections=connections) if standby_dsn else None
            database = Database(pool, standby)
            with suppress(DatabaseUnavailable):  # for the time; the watch reports whether it is up
                await database.look()
            return database


def _undated(name: str) -> str:
    """Returns a named statement that reads no partitions of days: without the days of its rollouts it would open all."""
    if is_by_day(name):
        raise KeyError(f"statement {name} reads by day")
    return SQL[name]


@contextmanager
def _closed_if_confused(connection: Any) -> Iterator[None]:
    """Closes a connection whose state the driver no longer knows, so that it is not reused.

    Raises:
        DatabaseUnavailable: If it was closed between two steps of a statement: the driver accesses an attribute that is gone.
    """
    try:
        yield
    except asyncpg.InternalClientError:
        connection.terminate()
        raise
    except AttributeError as error:
        if not connection.is_closed():
            raise
        raise DatabaseUnavailable("The connection to the store's database was lost.") from error


def columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[Sequence[Any]]:
    """Transposes rows into column arrays for `unnest`."""
    return list(zip(*rows, strict=True)) if rows else [()] * count
