"""The benchmark's generator writes days that the store reads as its own, and goes on where it stopped."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from benchmarks.store.years import SPANS_PER_ROLLOUT, Plan, contents, fill
from fulmen.ids import DEFAULT_PROJECT
from fulmen_store.database.database import Database
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.spans.table import SpanParent, SpanTable

PLAN = Plan(days=5, rollouts=200)


async def test_rollouts_of_each_day_are_there_with_their_spans(connection: Any, database: Database) -> None:
    assert await fill(connection, PLAN)
    found = await contents(connection)
    assert (found["days"], found["rollouts"], found["spans"]) == (5, 200, 2000)
    for table in ("rollout", "attempt", "rollout_end", "span_chunk"):
        assert await connection.fetchval(f"select count(*) from {table}") == 200
    assert await connection.fetchval("select sum(span_count) from span_chunk") == 200 * SPANS_PER_ROLLOUT
    days = await connection.fetch("select tableoid::regclass::text as name, count(*) from span_chunk group by 1")
    assert sorted(row["count"] for row in days) == [40] * 5
    names = ProjectNames(database)
    ids = [row["id"] for row in await connection.fetch("select id from rollout order by id")]
    views = await RolloutTable(database, names).view(ids, with_attempts=True)
    assert [view.rollout_id for view in views] == ids
    assert all(len(view.ended) == 1 for view in views)
    spans = SpanTable(database, names)
    (heads,) = await spans.heads([SpanParent(project=DEFAULT_PROJECT, rollout_id=ids[0])])
    assert [chunk.span_count async for chunk in spans.read(heads)] == [SPANS_PER_ROLLOUT]


async def test_a_fill_that_was_stopped_goes_on_and_makes_nothing_twice(connection: Any) -> None:
    assert not await fill(connection, Plan(days=5, rollouts=200, limit_s=0))
    assert not await fill(connection, Plan(days=5, rollouts=200, limit_bytes=0))
    assert await connection.fetchval("select count(*) from rollout") == 0
    await fill(connection, Plan(days=2, rollouts=80))
    latest = await connection.fetchval("select max(day) from bench_day")
    assert latest == datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    await connection.execute("delete from bench_day where day < $1", latest)
    await connection.execute(
        "delete from rollout where created_at < $1", datetime.datetime.combine(latest, datetime.time(), datetime.UTC)
    )
    for table in ("attempt", "rollout_end", "span_chunk"):
        await connection.execute(
            f"delete from {table} q where not exists (select from rollout r where r.id = q.rollout_id)"
        )
    assert await fill(connection, PLAN)
    assert (await contents(connection))["rollouts"] == 200
    assert await fill(connection, PLAN)
    assert await connection.fetchval("select count(*) from rollout") == 200


async def test_days_of_another_scale_are_not_mixed(connection: Any) -> None:
    await fill(connection, PLAN)
    with pytest.raises(ValueError, match="same scale"):
        await fill(connection, Plan(days=5, rollouts=400))
