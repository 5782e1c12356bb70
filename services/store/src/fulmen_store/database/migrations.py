"""Migrations of the schema: numbered files, forward only, applied in order under an advisory lock.

`NNNN_pre_*.sql` runs before the new version starts, automatically when a store starts. `NNNN_post_*.sql` removes what
only the previous release needs: it runs on request, when no older store runs, and no other file may depend on it. So the
previous release works on the new schema. An applied file never changes: its digest is stored.

After a restore the server's transaction counter is advanced. The feeds of finished rollouts and of resources are ordered by
PostgreSQL's transaction numbers and show rows older than the oldest running transaction. A dump restored into another
server contains numbers that this server has not reached yet: its rows would count as not committed, and feeds would stall.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import asyncpg
import structlog

from fulmen.errors import FulmenError
from fulmen_store.database.connections import mapped_errors
from fulmen_store.database.queries import SQL

__all__ = [
    "Migrated",
    "Migration",
    "MigrationError",
    "all_migrations",
    "catch_up",
    "migrate",
]

# "fulmen" in ASCII: the advisory lock of migrations.
LOCK_KEY: Final = 0x66756C6D656E
# Queries on a table wait behind a migration that waits for the table: for no longer than this, once per pause.
LOCK_LIMIT_MS: Final = 500
LOCK_PAUSE_S: Final = 2.0
# A dump may take this long.
TABLES_LIMIT_S: Final = 6 * 3600.0
_FILE_NAME: Final = re.compile(r"(\d{4})_(pre|post)_[a-z0-9_]+\.sql")
_log = structlog.get_logger()
_LEDGER: Final = """
create table if not exists schema_migration (
    number int primary key, name text not null, digest text not null, applied_at timestamptz not null default now()
)
"""


class MigrationError(FulmenError):
    """This version cannot migrate the schema of the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file."""

    number: int
    name: str
    text: str

    @property
    def is_post(self) -> bool:
        """Whether it may run only after all older stores have stopped."""
        return self.name.split("_")[1] == "post"

    @property
    def digest(self) -> str:
        """The SHA-256 of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """The result of a migration.

    Attributes:
        applied: Names of the newly applied files.
        waiting: Names of those that wait for `with_post`.
        caught_up: Number of transaction numbers consumed after a restore into a younger server.
    """

    applied: Sequence[str]
    waiting: Sequence[str]
    caught_up: int = 0


def all_migrations() -> list[Migration]:
    """Returns the migrations of this version in order."""
    found = []
    for file in resources.files(__package__).joinpath("migrations").iterdir():
        match = _FILE_NAME.fullmatch(file.name)
        if match is not None:
            found.append(Migration(number=int(match[1]), name=file.name, text=file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda migration: migration.number)


async def migrate(
    dsn: str,
    *,
    with_post: bool = False,
    migrations: Sequence[Migration] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Migrated:
    """Applies the missing migrations, and advances the transaction counter after a restore.

    Args:
        dsn: Database.
        with_post: Whether all older stores have stopped.
        migrations: All files in order; by default this version's.
        on_progress: Called with the transaction numbers consumed so far, and their total.

    Raises:
        DatabaseUnavailable: If the database cannot be reached.
        MigrationError: If an applied file differs from this version's, or the schema is newer; nothing was applied. Or if
            another session used the tables of a migration for six hours.
    """
    known = all_migrations() if migrations is None else migrations
    with mapped_errors():
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute("select pg_advisory_lock($1)", LOCK_KEY)
            missing = await _missing(connection, known)
            due = [migration for migration in missing if with_post or not migration.is_post]
            await _apply(connection, due)
            return Migrated(
                applied=[each.name for each in due],
                waiting=[each.name for each in missing if each not in due],
                caught_up=await catch_up(connection, on_progress=on_progress) if migrations is None else 0,
            )
        finally:
            await connection.close()


async def _missing(connection: asyncpg.Connection, known: Sequence[Migration]) -> list[Migration]:
    await connection.execute(_LEDGER)
    applied = {row["number"]: row for row in await connection.fetch("select number, digest from schema_migration")}
    if applied and max(applied) > known[-1].number:
        raise MigrationError("The database's schema is newer than this version of the store: upgrade the store.")
    for migration in known:
        if migration.number in applied and applied[migration.number]["digest"] != migration.digest:
            raise MigrationError(f"The migration {migration.name} was changed after it had been applied.")
    return [migration for migration in known if migration.number not in applied]


async def _apply(connection: asyncpg.Connection, migrations: Sequence[Migration]) -> None:
    await connection.execute(f"set lock_timeout = '{LOCK_LIMIT_MS}ms'")
    for migration in migrations:
        deadline = time.monotonic() + TABLES_LIMIT_S
        while not await _is_applied(connection, migration):
            if time.monotonic() > deadline:
                raise MigrationError(f"The migration {migration.name} needs tables that another session uses.")
            _log.warning("migration_waits_for_tables", migration=migration.name)
            await asyncio.sleep(LOCK_PAUSE_S)


async def _is_applied(connection: asyncpg.Connection, migration: Migration) -> bool:
    """Applies a migration; returns False, with nothing changed, if another session uses a table that it needs."""
    try:
        async with connection.transaction():
            await connection.execute(migration.text)
            await connection.execute(
                "insert into schema_migration (number, name, digest) values ($1, $2, $3)",
                migration.number, migration.name, migration.digest,
            )  # fmt: skip
    except asyncpg.LockNotAvailableError:
        return False
    return True


BATCH: Final = 500_000
"""Subtransactions of one transaction: their numbers are written to the log when it commits, 4 bytes each."""


async def catch_up(connection: asyncpg.Connection, *, on_progress: Callable[[int, int], None] | None = None) -> int:
    """Consumes transaction numbers until the next one is newer than all stored ones; about 200,000 per second.

    Args:
        connection: Connection to a database with the complete schema that is not otherwise in use.
        on_progress: Called after every batch with the numbers consumed so far, and their total.

    Returns:
        Number of consumed transaction numbers; 0 unless the database was restored from a dump into a younger server.
    """
    newest, following = await connection.fetchval(SQL["newest_stored_xid"]), await connection.fetchval(SQL["next_xid"])
    missing = max(0, newest + 1 - following)
    taken = 0
    if missing:
        await connection.execute(SQL["make_taken"])
    while taken < missing:
        count = min(BATCH, missing - taken)
        await connection.execute(SQL["take_xids"].format(count=count))
        taken += count
        if on_progress is not None:
            on_progress(taken, missing)
    if missing:
        await connection.execute(SQL["drop_taken"])
    return taken
