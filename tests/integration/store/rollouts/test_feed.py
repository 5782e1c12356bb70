"""The completion feed: whole groups, once, in one order, without gaps though commits are out of order."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from grpc.aio import EOF

from fulmen.errors import ArgumentInvalid, CursorInvalid, Draining
from fulmen.ids import uuid7
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import span_service_pb2
from fulmen_store.database.database import Database
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.rollouts.table import FeedTable
from tests.support.store.running import Runner, StoreHandle, Stubs, create, queue_stats, read_feed

INSERT_END = """
insert into rollout_end (rollout_id, project_id, group_key, group_size, state, failure_kind)
values ($1, 1, $2, $3, 4, 0)
"""


async def test_a_group_is_announced_once_and_whole_when_its_last_member_ends(stubs: Stubs) -> None:
    names = await create(stubs, 4, group_id="g", group_size=4)
    (alone,) = await create(stubs)
    runner = await Runner(stubs).open()
    taken = await runner.take(5)
    members = [one for one in taken if one.rollout.name != alone]
    await runner.complete(members[:3], rewards=[{"value": 1}])
    await runner.complete([one for one in taken if one.rollout.name == alone])
    (first,), cursor = await read_feed(stubs, groups=1)
    assert (first.group_id, [rollout.name for rollout in first.rollouts]) == (alone, [alone])
    await runner.complete(members[3:])
    (group,), _ = await read_feed(stubs, groups=1, cursor=cursor)
    assert group.group_id == "g"
    assert sorted(rollout.name for rollout in group.rollouts) == sorted(names)
    assert all(len(rollout.attempts) == 1 and rollout.attempts[0].final for rollout in group.rollouts)
    everything, _ = await read_feed(stubs, groups=2)
    assert [finished.group_id for finished in everything] == [alone, "g"]


async def test_a_training_run_sees_only_its_groups(stubs: Stubs) -> None:
    (mine,) = await create(stubs, training_run="projects/default/trainingRuns/mine")
    await create(stubs, 3, training_run="projects/default/trainingRuns/other")
    runner = await Runner(stubs).open()
    await runner.complete(await runner.take(4))
    (group,), cursor = await read_feed(stubs, groups=1, training_run="projects/default/trainingRuns/mine")
    assert group.group_id == mine
    of_another_database = Cursor(xid=2**40, rollout_id=uuid7()).encode(Selection(project_id=1))
    for wrong in (cursor, "nonsense", of_another_database):
        with pytest.raises(CursorInvalid):
            await read_feed(stubs, groups=1, cursor=wrong)


@pytest.mark.parametrize("training_run", ["", "projects/default/trainingRuns/none"])
async def test_watchers_are_told_that_the_store_stops(
    store: StoreHandle, stubs: Stubs, connection: asyncpg.Connection, training_run: str
) -> None:
    stream = stubs.rollouts.WatchRollouts(pb.WatchRolloutsRequest(training_run=training_run))
    waiting = asyncio.create_task(stream.read())
    await create(stubs)
    await store.parts.drain()
    with pytest.raises(Draining):
        await waiting
    assert await training_runs(connection) == []


async def test_a_row_that_commits_late_is_neither_skipped_nor_doubled(
    database: Database, connection: asyncpg.Connection, database_url: str
) -> None:
    feed, selection = FeedTable(database), Selection(project_id=1)
    slow = await asyncpg.connect(database_url)
    early, late, group = uuid7(), uuid7(), uuid7()
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute(INSERT_END, early, group, 2)
    await connection.execute(INSERT_END, late, group, 2)
    # The later row is committed, yet nothing may be handed out while the earlier one can still appear behind it.
    assert await feed.scan(selection, after=Cursor(), limit=10) == []
    await transaction.commit()
    rows = await feed.scan(selection, after=Cursor(), limit=10)
    assert [(row.cursor.rollout_id, row.completes) for row in rows] == [(early, False), (late, True)]
    assert [row.completes for row in await feed.scan(selection, after=rows[0].cursor, limit=10)] == [True]
    await slow.close()


async def test_the_feed_has_no_gap_and_no_double_under_concurrent_commits(
    database: Database, database_url: str
) -> None:
    feed, selection = FeedTable(database), Selection(project_id=1)
    groups = {uuid7(): [uuid7() for _ in range(4)] for _ in range(60)}
    done = asyncio.Event()

    async def write(position: int) -> None:
        connection = await asyncpg.connect(database_url)
        for index, (key, members) in enumerate(groups.items()):
            async with connection.transaction():
                await connection.execute(INSERT_END, members[position], key, 4)
                if (index + position) % 3 == 0:
                    await connection.execute("select pg_sleep(0.002)")
        await connection.close()

    async def follow() -> list[object]:
        cursor, seen = Cursor(), []
        while len(seen) < len(groups):
            finished = done.is_set()
            rows = await feed.scan(selection, after=cursor, limit=7)
            seen += [row.group_key for row in rows if row.completes]
            cursor = rows[-1].cursor if rows else cursor
            if finished and not rows:
                break
            await asyncio.sleep(0)
        return seen

    followers = [asyncio.create_task(follow()) for _ in range(2)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(write(position) for position in range(4)))
        done.set()
        first, second = await asyncio.gather(*followers)
    assert len(set(first)) == len(first) == len(groups)
    assert first == second


async def test_one_group_is_followed_by_its_id_alone(stubs: Stubs) -> None:
    run = {"training_run": "projects/default/trainingRuns/a"}
    mine = await create(stubs, 2, group_id="g", group_size=2, **run)
    await create(stubs, 2, group_id="other", group_size=2, **run)
    await create(stubs, 2, group_id="g", group_size=2, training_run="projects/default/trainingRuns/b")
    runner = await Runner(stubs).open()
    await runner.complete(await runner.take(6))
    (group,), cursor = await read_feed(stubs, groups=1, group_id="g", **run)
    assert sorted(rollout.name for rollout in group.rollouts) == sorted(mine)
    with pytest.raises(CursorInvalid):
        await read_feed(stubs, groups=1, cursor=cursor, **run)
    await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(names=mine[:1]))
    await runner.complete(await runner.take(1))
    stream = stubs.rollouts.WatchRollouts(pb.WatchRolloutsRequest(group_id="g", **run))
    async with asyncio.timeout(20):
        assert [finished.group_id for finished in (await stream.read()).groups] == ["g"]
    stream.cancel()


async def test_a_page_of_many_groups_is_read_batch_by_batch_and_arrives_whole(stubs: Stubs) -> None:
    for number in range(6):
        await create(stubs, 100, group_id=f"g{number}", group_size=100, input=b"x" * 8000)
    runner = await Runner(stubs).open()
    await runner.complete(await runner.take(600))
    stream = stubs.rollouts.WatchRollouts(pb.WatchRolloutsRequest())
    groups, messages = [], 0
    async with asyncio.timeout(20):
        while len(groups) < 6:
            groups += (await stream.read()).groups
            messages += 1
    stream.cancel()
    assert sorted(group.group_id for group in groups) == [f"g{number}" for number in range(6)]
    assert all(len(group.rollouts) == 100 for group in groups)
    assert messages >= 5
    rest, _ = await read_feed(stubs, groups=3, cursor=groups[2].cursor)
    assert [group.group_id for group in rest] == [group.group_id for group in groups[3:]]


async def test_who_watches_a_training_run_before_it_exists_sees_its_groups_and_may_resume(
    stubs: Stubs, connection: asyncpg.Connection
) -> None:
    watched = asyncio.create_task(read_feed(stubs, groups=2, training_run="projects/default/trainingRuns/later"))
    (other,) = await create(stubs, training_run="projects/default/trainingRuns/other")
    runner = await Runner(stubs).open()
    await runner.complete(await runner.take(1))
    await read_feed(stubs, groups=1)
    assert await training_runs(connection) == ["projects/default/trainingRuns/other"]
    assert not watched.done()
    names = await create(stubs, 2, training_run="projects/default/trainingRuns/later")
    await runner.complete(await runner.take(2))
    groups, _ = await watched
    assert sorted(group.group_id for group in groups) == sorted(names)
    rest, _ = await read_feed(
        stubs, groups=1, training_run="projects/default/trainingRuns/later", cursor=groups[0].cursor
    )
    assert [group.group_id for group in rest] == [groups[1].group_id]
    assert other not in names


async def test_looking_for_a_training_run_or_stopping_it_records_nothing(
    stubs: Stubs, connection: asyncpg.Connection
) -> None:
    unknown = "projects/default/trainingRuns/unknown"
    assert not (await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(training_run=unknown))).rollouts
    assert not (await queue_stats(stubs, training_run=unknown)).queued_count
    assert not (await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(training_run=unknown))).cancelled_count
    assert not (await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(filter="*", training_run=unknown))).rollouts
    assert await stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(training_run=unknown)).read() == EOF
    assert await training_runs(connection) == []
    with pytest.raises(ArgumentInvalid):
        await stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(training_run="malformed")).read()


async def training_runs(connection: asyncpg.Connection) -> list[str]:
    """Returns the names of the training runs that were recorded."""
    return [row["name"] for row in await connection.fetch("select name from training_run order by name")]
