"""The completion feed: whole groups, once, in one order, without gaps though commits are out of order."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import asyncpg
import pytest
from grpc.aio import EOF

from fulmen.errors import ArgumentInvalid, CursorInvalid, Draining
from fulmen.ids import uuid7
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import span_service_pb2
from fulmen_store.database.database import Database
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.rollouts.feed_watch import MAX_ENDS, FeedWatch
from fulmen_store.rollouts.table import FeedTable
from tests.support.store.running import Runner, StoreHandle, Stubs, create, queue_stats, read_feed, running_store

IDLE, ENDS = 30, 20
OPEN = """
select count(*) from pg_stat_activity where datname = current_database() and application_name = 'fulmen-store'
"""
INSERT_END_OF_RUN = """
insert into rollout_end (rollout_id, project_id, run_id, group_size, state, failure_kind) values ($1, $2, $3, 1, 4, 0)
"""

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


async def test_an_end_is_read_by_those_who_watch_its_training_run_alone(
    database_url: str, connection: asyncpg.Connection
) -> None:
    watched = "projects/default/trainingRuns/watched"
    idle = [f"projects/default/trainingRuns/idle-{number}" for number in range(IDLE)]
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        await create(stubs, training_run=watched)
        for name in idle:
            await create(stubs, training_run=name)
        watchers = [stubs.rollouts.WatchRollouts(pb.WatchRolloutsRequest(training_run=name)) for name in idle]
        reads = [asyncio.create_task(watcher.read()) for watcher in watchers]
        runner, cursor = await Runner(stubs).open(), ""
        assignments = {one.rollout.training_run: one for one in await runner.take(1 + IDLE)}
        await runner.complete([assignments[watched]])
        for _ in range(ENDS):
            _, cursor = await read_feed(stubs, groups=1, training_run=watched, cursor=cursor)
            await create(stubs, training_run=watched)
            await runner.complete(await runner.take(1))
        assert not any(read.done() for read in reads)
        for name, read in zip(idle, reads, strict=True):
            await runner.complete([assignments[name]])
            assert len((await read).groups) == 1
    # A connection tells what it has counted when it is closed.
    async with asyncio.timeout(20):
        while await connection.fetchval(OPEN):  # noqa: ASYNC110  # of a server
            await asyncio.sleep(0.05)
    scans = await connection.fetchval(
        "select idx_scan from pg_stat_user_indexes where indexrelname = 'rollout_end_by_run'"
    )
    # Watchers that all ends wake make IDLE reads after each.
    assert 0 < scans < IDLE * ENDS / 2


async def test_what_a_transaction_hides_is_told_as_lag_and_found_when_it_ends(
    database: Database, connection: asyncpg.Connection, database_url: str
) -> None:
    watch = FeedWatch(table=FeedTable(database), poll_interval_s=60.0)
    slow = await asyncpg.connect(database_url)
    with watch.watching(1, None) as news:
        await watch.look()
        assert news.is_set()  # a project that was not looked at before
        news.clear()
        transaction = slow.transaction()
        await transaction.start()
        await slow.execute("select pg_current_xact_id()")
        await connection.execute(INSERT_END, uuid7(), None, 1)
        await watch.look()
        assert (news.is_set(), watch.lag_s > 0) == (False, True)
        await transaction.commit()
        await watch.look()
        assert (news.is_set(), watch.lag_s) == (True, 0.0)
        news.clear()
        await watch.look()
        assert not news.is_set()
    await slow.close()


async def test_only_those_watchers_are_woken_whose_training_run_has_news(
    database: Database, connection: asyncpg.Connection
) -> None:
    watch = FeedWatch(table=FeedTable(database), poll_interval_s=60.0)
    scopes = [(1, None), (1, 1), (1, 2), (2, None), (2, 1)]
    with ExitStack() as stack:
        news = {scope: stack.enter_context(watch.watching(*scope)) for scope in scopes}

        async def woken_by(*ends: tuple[int, int | None]) -> list[tuple[int, int | None]]:
            await watch.look()
            for event in news.values():
                event.clear()
            for project_id, run_id in ends:
                await connection.execute(INSERT_END_OF_RUN, uuid7(), project_id, run_id)
            await watch.look()
            return [scope for scope, event in news.items() if event.is_set()]

        assert await woken_by() == []
        assert await woken_by((1, 2)) == [(1, None), (1, 2)]
        assert await woken_by((2, None)) == [(2, None)]
        assert await woken_by((1, 3), (2, 1)) == [(1, None), (2, None), (2, 1)]
        # More than a look reads: everybody of the project looks.
        assert await woken_by(*[(1, 3)] * MAX_ENDS) == [(1, None), (1, 1), (1, 2)]


async def training_runs(connection: asyncpg.Connection) -> list[str]:
    """Returns the names of the training runs that were recorded."""
    return [row["name"] for row in await connection.fetch("select name from training_run order by name")]
