"""Connections to PostgreSQL, and the translation of its errors into the store's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import asyncpg

from fulmen.errors import ArgumentInvalid, DatabaseUnavailable, Violation
from fulmen_store.resources.versions import version_was_removed

__all__ = ["HOT_SETTINGS", "mapped_errors", "open_pool"]

CONNECT_LIMIT_S: Final = 10.0
STATEMENT_LIMIT_S: Final = 15.0
# Violated by a rollout that names a version which was removed at the same moment.
USE_CONSTRAINT: Final = "resource_use_is_kept"

# Plans must stay index probes whatever the statistics are, also if they were made while the tables were empty.
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
    "size": ("group_size", "differs from the group's other members"),
}


class HotConnection(asyncpg.Connection):
    """A connection that returns to the pool without a round trip: no statement leaves session state."""

    def get_reset_query(self) -> str:
        """Returns the query that resets a session: none."""
        return ""


async def open_pool(
    dsn: str, *, connections: int, limit_s: float = CONNECT_LIMIT_S, min_connections: int = 1
) -> asyncpg.Pool:
    """Opens a pool with `min_connections`; it opens up to `connections` on demand.

    Raises:
        DatabaseUnavailable: If PostgreSQL did not accept the connection within the limit.
    """
    with mapped_errors():
        return await asyncpg.create_pool(
            dsn,
            min_size=min_connections,
            max_size=connections,
            timeout=limit_s,
            server_settings=HOT_SETTINGS,
            connection_class=HotConnection,
            max_inactive_connection_lifetime=0,
        )


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Maps errors of the database to errors of the store.

    Raises:
        DatabaseUnavailable: For errors that may be temporary.
        ArgumentInvalid: For values that only the database can reject.
    """
    try:
        yield
    except asyncpg.DiskFullError as error:
        raise DatabaseUnavailable("The disk of the store's database is full.") from error
    except asyncpg.LockNotAvailableError as error:
        raise DatabaseUnavailable("Another session locks a table of the store's database.") from error
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
