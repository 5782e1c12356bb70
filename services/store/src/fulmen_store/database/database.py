"""The connections to PostgreSQL; maps its errors to those of the store.

Invariant: while PostgreSQL is known to be unavailable, every statement fails immediately, including those in progress.
`DatabaseWatch` decides when it is unavailable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import asyncpg
import structlog

from fulmen.errors import ArgumentInvalid, DatabaseUnavailable, Violation
from fulmen_service_kit.security.auth import current_tenant
from fulmen_service_kit.security.fair_turns import FairSlots
from fulmen_store.database.queries import SQL, filtered
from fulmen_store.database.server_clock import ServerClock
from fulmen_store.resources.versions import version_was_removed

__all__ = ["Database", "connect", "open_pool"]

ACQUIRE_LIMIT_S: Final = 10.0
STATEMENT_LIMIT_S: Final = 15.0
CONNECT_LIMIT_S: Final = 10.0
RETRY_PAUSE_S: Final = 0.2
# Violated by a rollout that names a version which was removed at the same moment.
USE_CONSTRAINT: Final = "resource_use_is_kept"
FREE_POLL_S: Final = 0.02
FULL_S: Final = 5.0
"""After a statement that found no space, the database counts as full."""

_log = structlog.get_logger()

# Plans must stay index probes whatever the statistics say, also those made while the tables were empty.
HOT_SETTINGS: Final = {
    "application_name": "fulmen-store",
    "enable_seqscan": "off",
    # A bitmap has no order: a statement with a limit would read everything that waits.
    "enable_bitmapscan": "off",
    "enable_incremental_sort": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "statement_timeout": "15s",
    "idle_in_transaction_session_timeout": "15s",
    "work_mem": "32MB",
    "timezone": "UTC",
}

# The same statement may succeed on another connection or a moment later.
_PASSING: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.ReadOnlySQLTransactionError,
    # The server died between two messages of a statement, before the loop has seen the end of the connection.
    asyncpg.InternalClientError,
    asyncpg.PostgresSystemError,
    OSError,
    TimeoutError,
)

_FIELDS_OF_CONSTRAINTS: Final = {
    "rollout_group_not_overfull": ("group_id", "the group has more members than group_size"),
    "size": ("group_size", "differs from that of the group's members"),
}


class HotConnection(asyncpg.Connection):
    """A connection that returns to the pool without a round trip: no statement leaves session state."""

    def get_reset_query(self) -> str:
        """Returns the query that resets a session: none."""
        return ""


class Database:
    """Runs named statements; each is one commit unless it runs inside `transaction`."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool: asyncpg.Pool | None = pool
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
        """Whether the database is up and has had space of late."""
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
        """Looks whether the server is writable, and what time it is there; over a connection of the pool if none is given.

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
        async with self._connection() as connection:
            return await connection.fetch(SQL[name], *arguments, timeout=STATEMENT_LIMIT_S)

    async def fetch_filtered(
        self, name: str, condition: str, *arguments: object, order: str = ""
    ) -> list[asyncpg.Record]:
        """Runs a named statement with a condition, and an order if one is given, in the places that it marks for them.

        Raises:
            DatabaseUnavailable: If the outcome is unknown.
        """
        async with self._connection() as connection:
            return await connection.fetch(filtered(name, condition, order), *arguments, timeout=STATEMENT_LIMIT_S)

    async def fetch_row(self, name: str, *arguments: object) -> asyncpg.Record | None:
        """Runs a named statement and returns its first row."""
        rows = await self.fetch(name, *arguments)
        return rows[0] if rows else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Runs several named statements in one commit."""
        async with self._connection() as connection, connection.transaction():
            yield Transaction(connection)

    async def close(self) -> None:
        """Closes the connections; waits briefly for statements in progress."""
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
        return await self._connection.fetch(SQL[name], *arguments, timeout=STATEMENT_LIMIT_S)

    async def fetch_row(self, name: str, *arguments: object) -> asyncpg.Record | None:
        """Runs a named statement and returns its first row."""
        rows = await self.fetch(name, *arguments)
        return rows[0] if rows else None


async def connect(dsn: str, *, connections: int, start_limit_s: float) -> Database:
    """Opens the pool; waits for a database that is still starting.

    Args:
        dsn: Connection URL.
        connections: Maximum number of connections.
        start_limit_s: How long to wait for the database, seconds.

    Raises:
        DatabaseUnavailable: If it did not answer in time.
    """
    deadline = time.monotonic() + start_limit_s
    while True:
        try:
            database = Database(await open_pool(dsn, connections=connections))
        except DatabaseUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_PAUSE_S)
        else:
            with suppress(DatabaseUnavailable):  # for the time; the watch says whether it is up
                await database.look()
            return database


async def open_pool(dsn: str, *, connections: int, limit_s: float = CONNECT_LIMIT_S) -> asyncpg.Pool:
    """Opens a pool with one connection; it opens up to `connections` on demand.

    Raises:
        DatabaseUnavailable: If PostgreSQL did not accept the connection within the limit.
    """
    with mapped_errors():
        return await asyncpg.create_pool(
            dsn,
            min_size=1,
            max_size=connections,
            timeout=limit_s,
            server_settings=HOT_SETTINGS,
            connection_class=HotConnection,
            max_inactive_connection_lifetime=0,
        )


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


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Maps errors of the database to those of the store.

    Raises:
        DatabaseUnavailable: For errors that may be temporary.
        ArgumentInvalid: For values that only the database can reject.
    """
    try:
        yield
    except asyncpg.DiskFullError as error:
        raise DatabaseUnavailable("The disk of the store's database is full.") from error
    except _PASSING as error:
        raise DatabaseUnavailable("The store's database cannot be reached.") from error
    except (asyncpg.DataError, asyncpg.InterfaceError, asyncpg.ProgramLimitExceededError) as error:
        if isinstance(error, asyncpg.DataError | asyncpg.ProgramLimitExceededError | ValueError):
            # A number out of range or a character that PostgreSQL cannot hold, such as NUL.
            raise ArgumentInvalid("A value of the request cannot be stored.") from error
        raise DatabaseUnavailable("The connection to the store's database was lost.") from error
    except asyncpg.ForeignKeyViolationError as error:
        if error.constraint_name != USE_CONSTRAINT:
            raise
        raise version_was_removed() from error
    except (asyncpg.CheckViolationError, asyncpg.NotNullViolationError) as error:
        known = _FIELDS_OF_CONSTRAINTS.get(error.constraint_name or error.column_name or "")
        if known is None or error.table_name != "rollout_group":
            raise
        field, description = known
        raise ArgumentInvalid(
            "The rollouts cannot be created.",
            violations=[Violation(field=f"rollouts[].{field}", description=description)],
        ) from error


def columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[Sequence[Any]]:
    """Transposes rows into column arrays for `unnest`."""
    return list(zip(*rows, strict=True)) if rows else [()] * count
