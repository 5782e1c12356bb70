"""Migrations: the schema is the same at once and file by file, and changes of applied files are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from fulmen_store.database.migrations import Migration, MigrationError, all_migrations, migrate
from tests.support.postgres import shared_server
from tests.support.store.process import StoreProcess
from tests.support.store.running import LIMIT_S, create, running_store
from tests.support.store.schema import catalog


@pytest.fixture
def empty_url() -> Iterator[str]:
    """Yields the URL of a database without a schema."""
    server = shared_server()
    dsn = server.fresh_database(migrated=False)
    yield dsn
    server.drop(dsn)


def test_migrations_are_numbered_without_a_gap() -> None:
    known = all_migrations()
    assert [each.number for each in known] == list(range(1, len(known) + 1))


async def test_the_schema_is_the_same_at_once_and_file_by_file(empty_url: str) -> None:
    known = all_migrations()
    for count in range(1, len(known) + 1):
        migrated = await migrate(empty_url, with_post=True, migrations=known[:count])
        assert migrated.applied == [known[count - 1].name]
    server = shared_server()
    fresh = server.fresh_database(migrated=False)
    await migrate(fresh, with_post=True)
    at_once, by_file = await catalog(fresh), await catalog(empty_url)
    assert len(at_once) > 300
    assert at_once == by_file, at_once ^ by_file
    server.drop(fresh)


async def test_applying_twice_changes_nothing(database_url: str) -> None:
    before = await catalog(database_url)
    migrated = await migrate(database_url)
    assert list(migrated.applied) == []
    assert await catalog(database_url) == before


async def test_replicas_that_start_at_once_migrate_once(empty_url: str) -> None:
    results = await asyncio.gather(*(migrate(empty_url) for _ in range(3)))
    names = [migration.name for migration in all_migrations() if not migration.is_post]
    assert sorted([list(result.applied) for result in results]) == [[], [], names]

    async def serve() -> None:
        async with running_store(fresh) as store:
            assert await create(await store.stubs(), 1)

    server = shared_server()
    fresh = server.fresh_database(migrated=False)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(serve(), serve())
    server.drop(fresh)


async def test_a_changed_file_is_refused_and_nothing_is_applied(empty_url: str) -> None:
    known = all_migrations()
    await migrate(empty_url, migrations=known[:1])
    changed = [replace(known[0], text=known[0].text + "\n-- A harmless remark."), *known[1:]]
    before = await catalog(empty_url)
    with pytest.raises(MigrationError, match=f"{known[0].name} was changed after it had been applied"):
        await migrate(empty_url, migrations=changed)
    assert await catalog(empty_url) == before


async def test_a_store_does_not_start_on_a_newer_schema(database_url: str, tmp_path: Path) -> None:
    known = all_migrations()
    newer = Migration(number=9000, name="9000_pre_future.sql", text="create table future (id int)")
    await migrate(database_url, migrations=[*known, newer])
    with pytest.raises(MigrationError, match="newer than this version of the store: upgrade"):
        await migrate(database_url)
    process = StoreProcess(database_url, tmp_path)
    told, _ = await asyncio.to_thread(process.process.communicate, timeout=LIMIT_S)
    assert process.process.returncode == 1
    assert "newer than this version of the store" in told
    assert "Traceback" not in told


async def test_what_the_last_release_needs_is_taken_away_only_when_told(empty_url: str) -> None:
    known = [
        Migration(number=1, name="0001_pre_first.sql", text="create table old (id int)"),
        Migration(number=2, name="0002_post_old.sql", text="drop table old"),
        Migration(number=3, name="0003_pre_third.sql", text="create table new (id int)"),
    ]
    migrated = await migrate(empty_url, migrations=known)
    assert migrated.applied == ["0001_pre_first.sql", "0003_pre_third.sql"]
    assert migrated.waiting == ["0002_post_old.sql"]
    assert (await migrate(empty_url, migrations=known)).waiting == ["0002_post_old.sql"]
    migrated = await migrate(empty_url, with_post=True, migrations=known)
    assert (migrated.applied, migrated.waiting) == (["0002_post_old.sql"], [])
    connection = await asyncpg.connect(empty_url)
    tables = "select relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
    assert {row[0] for row in await connection.fetch(tables)} == {"schema_migration", "new"}
    await connection.close()


@pytest.mark.parametrize("arguments", [(), ("--post",)])
def test_the_command_migrates_and_ends(empty_url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for expected in ([each.name for each in all_migrations() if arguments or not each.is_post], []):
        process = StoreProcess(empty_url, tmp_path, "migrate", *arguments)
        told, _ = process.process.communicate(timeout=LIMIT_S)
        assert process.process.returncode == 0, told
        applied = [line.removeprefix("applied ") for line in told.splitlines() if line.startswith("applied ")]
        assert applied == expected
        assert "The schema is up to date." in told
