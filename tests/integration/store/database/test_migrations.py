"""Migrations: the schema is the same at once and file by file, and changes of applied files are refused."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from fulmen.ids import uuid7
from fulmen_store.database.migrations import Migration, MigrationError, all_migrations, migrate
from tests.support.postgres import shared_server
from tests.support.store.process import StoreProcess
from tests.support.store.running import LIMIT_S, create, running_store
from tests.support.store.schema import catalog

WAITS = """
select exists (
    select from pg_locks l join pg_database d on d.oid = l.database where d.datname = current_database() and not l.granted
)
"""


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


async def test_what_lay_in_partitions_by_day_is_all_kept(empty_url: str) -> None:
    await migrate(empty_url, migrations=[each for each in all_migrations() if each.number < 8])
    connection = await asyncpg.connect(empty_url)
    today = datetime.datetime.now(datetime.UTC).date()
    await connection.execute("call create_day_partitions($1)", today)
    # The second one is of a day that has no partition.
    ids = [uuid7(), uuid7(int((time.time() - 20 * 86_400) * 1000))]
    tables = {
        "rollout": "select x.id, 1, null, 0, 1, 'g', null, null, '\\x01'::bytea, now() from x",
        "attempt": "select x.id, 1, 2, 0, 4, x.id, now(), now(), '\\x02'::bytea from x",
        "rollout_end": "select x.id, 1, null, x.id, 1, 4, 0, 0.5, 1, null, '7'::xid8, now() from x",
        "span_chunk": "select x.id, 1, x.id, 3, 2, 5, 6, '\\x03'::bytea, null, null from x",
    }
    for table, rows in tables.items():
        await connection.execute(f"with x as (select unnest($1::uuid[]) as id) insert into {table} {rows}", ids)
    before = {table: await _rows(connection, table) for table in tables}
    assert all(len(rows) == len(ids) for rows in before.values())

    await migrate(empty_url)

    after = {table: await _rows(connection, table) for table in tables}
    # A later migration may have added columns.
    assert {
        table: [row | was for row, was in zip(after[table], before[table], strict=True)] for table in tables
    } == after
    days = await connection.fetch("select partition_days('span_chunk') as day order by day")
    assert [row["day"] for row in days] == [today - datetime.timedelta(days=20), today]
    # What a store of the last version calls at its start.
    await connection.execute("call create_day_partitions($1)", today + datetime.timedelta(days=1))
    assert await connection.fetchval("select count(*) from partition_days('span_chunk')") == len(days) + 1
    await connection.close()


async def test_a_migration_waits_for_a_dump_and_nobody_waits_for_the_migration(empty_url: str) -> None:
    first = Migration(number=1, name="0001_pre_first.sql", text="create table work (id int)")
    second = Migration(number=2, name="0002_pre_second.sql", text="alter table work add column name text")
    await migrate(empty_url, migrations=[first])
    dump, other = await asyncpg.connect(empty_url), await asyncpg.connect(empty_url)
    async with dump.transaction(), asyncio.timeout(LIMIT_S):
        await dump.execute("lock table work in access share mode")
        waiting = asyncio.create_task(migrate(empty_url, migrations=[first, second]))
        while not await other.fetchval(WAITS):  # noqa: ASYNC110  # state of the server
            await asyncio.sleep(0.01)
        await other.execute("insert into work values (1)")
        assert not waiting.done()
    assert (await waiting).applied == [second.name]
    for connection in (dump, other):
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


async def _rows(connection: asyncpg.Connection, table: str) -> list[dict[str, object]]:
    return [dict(row) for row in await connection.fetch(f"select * from {table} order by 1")]
