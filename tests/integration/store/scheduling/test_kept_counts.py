"""Counts of the queue are kept by whoever changes it: right after every commit, and as cheap as there are kinds of rollouts."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from fulmen_store.database.database import Database
from fulmen_store.database.queries import SQL
from fulmen_store.scheduling.table import DemandTable
from tests.support.store.rollouts import moment
from tests.support.store.running import LIMIT_S, Runner, Stubs, cancel, create, queue_stats

RUN = "projects/default/trainingRuns/{}"
COUNTED = """
insert into live_count (project_id, sort_priority, task_type, live)
select 1, 0, n % $2::int, 1 from generate_series(1, $1::int) n
"""


def test_who_adds_or_removes_live_rollouts_counts_them() -> None:
    marks = ("insert into item (", "delete from item ", "update item q set sort_priority")
    changing = {name for name, text in SQL.items() if any(mark in " ".join(text.split()) for mark in marks)}
    assert len(changing) == 6
    assert changing == {name for name, text in SQL.items() if "insert into live_count" in text} - {"fold_counts"}


async def test_counts_are_those_of_the_rows_whatever_becomes_of_them(
    stubs: Stubs, connection: asyncpg.Connection
) -> None:
    names = await create(stubs, 4, training_run=RUN.format("a"), priority=3)
    await create(stubs, 3, training_run=RUN.format("b"), not_before_time=moment(3600))
    runner = await Runner(stubs).open()
    taken = await runner.take(3)
    await shown(stubs, (1, 3, 3))
    await runner.complete(taken[:1])
    await runner.complete(taken[1:2], failure_kind=4)
    await cancel(stubs, *names)
    await shown(stubs, (0, 1, 3))
    await shown(stubs, (0, 1, 0), training_run=RUN.format("a"))
    await shown(stubs, (0, 0, 3), training_run=RUN.format("b"))
    await runner.complete(taken[2:], failure_kind=6)
    await shown(stubs, (0, 0, 0), training_run=RUN.format("a"))
    assert await connection.fetchval("select sum(live) from live_count") == 3


async def test_folded_counts_are_the_same_and_one_row_per_kind(
    connection: asyncpg.Connection, database: Database
) -> None:
    table, kinds = DemandTable(database), 6
    await connection.execute(COUNTED, 3 * kinds, kinds)
    before = await table.work()
    assert sum(work.queued for work in before) == 3 * kinds
    await table.fold()
    assert sorted(await table.work(), key=str) == sorted(before, key=str)
    assert [row["live"] for row in await connection.fetch("select live from live_count")] == [3] * kinds
    # Few new rows among many folded ones are left for later.
    await connection.execute(COUNTED, 1, kinds)
    await table.fold()
    assert await connection.fetchval("select count(*) from live_count where not folded") == 1
    # What comes to nothing goes.
    await connection.execute(
        "insert into live_count (project_id, sort_priority, task_type, live)"
        " select project_id, sort_priority, task_type, -live from live_count"
    )
    await table.fold()
    assert await connection.fetchval("select count(*) from live_count") == 0


async def shown(stubs: Stubs, expected: tuple[int, int, int], **selection: Any) -> None:
    """Waits until so many rollouts wait, run and are delayed: a count that took long is kept for a while."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            stats = await queue_stats(stubs, **selection)
            if (stats.queued_count, stats.running_count, stats.delayed_count) == expected:
                return
            await asyncio.sleep(0.05)
