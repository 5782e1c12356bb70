"""Brings the schema up to date: numbered files, forward only, one after the other under an advisory lock.

`NNNN_pre_*.sql` runs before the new program version, `NNNN_post_*.sql` when no older one runs any more, so that the
last release works on the new schema. A file that was applied never changes: its digest is kept.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Final

import asyncpg

from fulmen.errors import FulmenError
from fulmen_store.persistence.database import mapped_errors

__all__ = ["Migration", "MigrationError", "all_migrations", "migrate"]

# "fulmen" in ASCII: the advisory lock of migrations.
LOCK_KEY: Final = 0x66756C6D656E
_FILE_NAME: Final = re.compile(r"(\d{4})_(pre|post)_[a-z0-9_]+\.sql")
_LEDGER: Final = """
create table if not exists schema_migration (
    number int primary key, name text not null, digest text not null, applied_at timestamptz not null default now()
)
"""


class MigrationError(FulmenError):
    """The database's schema is not one that this version can bring up to date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file."""

    number: int
    name: str
    text: str

    @property
    def digest(self) -> str:
        """The SHA-256 of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def all_migrations() -> list[Migration]:
    """Returns the migrations of this version in order."""
    found = []
    for file in resources.files(__package__).joinpath("migrations").iterdir():
        match = _FILE_NAME.fullmatch(file.name)
        if match is not None:
            found.append(Migration(number=int(match[1]), name=file.name, text=file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda migration: migration.number)


async def migrate(dsn: str) -> list[str]:
    """Applies what is missing and returns the names of the applied files.

    Raises:
        DatabaseUnavailable: if the database cannot be reached.
        MigrationError: if an applied file differs from this version's, or the schema is newer.
    """
    with mapped_errors():
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute("select pg_advisory_lock($1)", LOCK_KEY)
            return await _apply_missing(connection)
        finally:
            await connection.close()


async def _apply_missing(connection: asyncpg.Connection) -> list[str]:
    await connection.execute(_LEDGER)
    applied = {
        row["number"]: row for row in await connection.fetch("select number, name, digest from schema_migration")
    }
    known = all_migrations()
    if applied and max(applied) > known[-1].number:
        raise MigrationError("The database's schema is newer than this version of the store: upgrade the store.")
    done = []
    for migration in known:
        row = applied.get(migration.number)
        if row is not None:
            if row["digest"] != migration.digest:
                raise MigrationError(f"The migration {migration.name} was changed after it had been applied.")
            continue
        async with connection.transaction():
            await connection.execute(migration.text)
            await connection.execute(
                "insert into schema_migration (number, name, digest) values ($1, $2, $3)",
                migration.number, migration.name, migration.digest,
            )  # fmt: skip
        done.append(migration.name)
    return done
