"""Connections that end at awkward moments: whoever uses one is told that the database is away, and nothing else."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from fulmen.errors import DatabaseUnavailable
from fulmen_store.database.connections import mapped_errors
from fulmen_store.database.database import Database


def end_connections(patch: pytest.MonkeyPatch) -> None:
    """Ends each connection between the two steps of a statement: when it is prepared, and before it is run."""
    prepare = asyncpg.Connection._get_statement

    async def prepare_and_end(self: asyncpg.Connection, *arguments: Any, **options: Any) -> Any:
        statement = await prepare(self, *arguments, **options)
        self.terminate()
        return statement

    patch.setattr(asyncpg.Connection, "_get_statement", prepare_and_end)


async def test_a_connection_that_ends_within_a_statement_is_a_lost_database(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_connections(monkeypatch)
    with pytest.raises(DatabaseUnavailable):
        await database.fetch("next_xid")
    assert database.suspected.is_set()


async def test_a_connection_that_ends_within_a_transaction_is_a_lost_database(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_connections(monkeypatch)
    with pytest.raises(DatabaseUnavailable):
        async with database.transaction() as transaction:
            await transaction.fetch("next_xid")


async def test_a_table_that_another_session_locks_is_a_database_to_try_again(
    database_url: str, connection: asyncpg.Connection
) -> None:
    other = await asyncpg.connect(database_url, server_settings={"lock_timeout": "10ms"})
    async with connection.transaction():
        await connection.execute("lock table rollout")
        with pytest.raises(DatabaseUnavailable, match="locks a table"), mapped_errors():
            await other.fetch("select from rollout")
    await other.close()


async def test_a_mistake_of_ours_is_none_of_the_databases(database: Database) -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        async with database.transaction() as transaction:
            transaction.nothing_of_the_kind()


async def test_the_next_statement_has_another_connection(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        end_connections(patched)
        with pytest.raises(DatabaseUnavailable):
            await database.fetch("next_xid")
    assert len(await database.fetch("next_xid")) == 1
