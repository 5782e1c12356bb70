"""The days' partitions are made in time, and whoever reads the database for hours holds up neither that nor the store."""

from __future__ import annotations

import datetime
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest

from fulmen.errors import DatabaseUnavailable
from fulmen.ids import DEFAULT_PROJECT, parse_rollout_name, rollout_name, uuid7
from fulmen_store.database.database import Database
from fulmen_store.database.days import day_of
from fulmen_store.retention.retention import DAYS_AHEAD, Maintenance
from fulmen_store.retention.table import UpkeepTable
from tests.support.store.manual_clock import ManualClock
from tests.support.store.running import StoreHandle, Stubs, create, running_store
from tests.support.store.spans import append, chunk_of, stored

DAY_S = 86_400.0
TODAY = datetime.datetime.now(datetime.UTC).date()
TABLES = """
select format('%I', c.relname) from pg_class c
where c.relkind in ('r', 'p') and c.relnamespace = 'public'::regnamespace order by c.relname
"""


@asynccontextmanager
async def held(connection: Any, mode: str, *tables: str) -> AsyncIterator[None]:
    """Holds a lock and a snapshot, as one that works in the database for long."""
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    try:
        await connection.execute(f"lock table {', '.join(tables)} in {mode} mode")
        await connection.fetchval("select count(*) from project")
        yield
    finally:
        await transaction.rollback()


async def all_tables(connection: Any) -> list[str]:
    """Returns the tables that a dump reads."""
    return [row[0] for row in await connection.fetch(TABLES)]


async def days(connection: Any) -> list[datetime.date]:
    """Returns the days that have a partition, in order."""
    return [row[0] for row in await connection.fetch("select partition_days('span_chunk') as day order by day")]


async def test_a_dump_holds_up_neither_upkeep_nor_creation_nor_a_start(
    connection: Any, database: Database, database_url: str, store: StoreHandle, stubs: Stubs
) -> None:
    last = (await days(connection))[-1]
    upkeep = Maintenance(table=UpkeepTable(database), clock=in_days(5))
    async with held(connection, "access share", *await all_tables(connection)):
        await upkeep.run_once()
        assert await spans_are_stored(stubs)
        async with running_store(database_url) as late:
            assert await spans_are_stored(await late.stubs())
    assert (await days(connection))[-1] == last + datetime.timedelta(days=5)


async def test_what_changes_the_table_of_all_days_puts_upkeep_off_and_not_the_store(
    connection: Any, database: Database, store: StoreHandle, stubs: Stubs
) -> None:
    """As `vacuum`, `analyze` and `create index concurrently` of the table do."""
    before = await days(connection)
    upkeep = Maintenance(table=UpkeepTable(database), clock=in_days(5))
    async with held(connection, "share update exclusive", "only span_chunk"):
        with pytest.raises(DatabaseUnavailable, match="day"):
            await upkeep.run_once()
        assert await spans_are_stored(stubs)
    assert await days(connection) == before
    await upkeep.run_once()
    assert len(await days(connection)) == len(before) + 5


async def test_upkeep_makes_a_month_ahead_and_the_day_before(connection: Any) -> None:
    made = await days(connection)
    assert made == [made[0] + datetime.timedelta(days=number) for number in range(DAYS_AHEAD + 2)]
    assert DAYS_AHEAD >= 30
    assert made[0] < TODAY


async def test_spans_of_a_day_that_upkeep_did_not_make_are_stored(connection: Any, stubs: Stubs) -> None:
    name = await aged(connection, stubs, days_ago=40)
    strange = rollout_name(DEFAULT_PROJECT, old_id(days_ago=50))
    before = await days(connection)
    answer = await append(stubs, chunk_of(f"{strange}/attempts/1"), chunk_of(f"{name}/attempts/1"))
    assert answer.accepted_count == 1
    assert len(await stored(stubs, name)) == 1
    # None for a rollout that does not exist: names are callers' words.
    made = set(await days(connection)) - set(before)
    assert made == {day_of(parse_rollout_name(name).rollout_id)}


async def aged(connection: Any, stubs: Stubs, *, days_ago: int) -> str:
    """Creates a rollout that looks as if it were made so many days ago; the store refuses ids of another time."""
    (name,) = await create(stubs)
    old = old_id(days_ago=days_ago)
    for table in ("rollout", "item"):
        await connection.execute(f"update {table} set id = $2 where id = $1", parse_rollout_name(name).rollout_id, old)
    return rollout_name(DEFAULT_PROJECT, old)


def old_id(*, days_ago: int) -> UUID:
    """Makes an id of another day."""
    return uuid7(int((time.time() - days_ago * DAY_S) * 1000))


async def spans_are_stored(stubs: Stubs) -> bool:
    """Creates a rollout, stores a chunk of it, and returns whether it can be read."""
    (name,) = await create(stubs)
    await append(stubs, chunk_of(f"{name}/attempts/1"))
    return len(await stored(stubs, name)) == 1


def in_days(count: int) -> ManualClock:
    """Returns a clock that shows a later day."""
    return ManualClock(time.time() + count * DAY_S)
