"""Spans of ended rollouts move into segments, and readers see no difference."""

from __future__ import annotations

import asyncio
from typing import Any

from fulmen.ids import parse_attempt_name
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen_store.clock import Clock
from fulmen_store.database.database import Database
from fulmen_store.spans.blobs import Blobs, open_storage
from fulmen_store.spans.table import SpanParent
from tests.support.store.running import Runner, StoreHandle, Stubs, create, running_store
from tests.support.store.segments import ended_rollouts, mover_of, read_all, rows, spanned, table_of
from tests.support.store.spans import append, stored

MIB = 1024 * 1024


async def test_every_way_of_reading_gives_the_same_before_and_after(
    database_url: str, database: Database, connection: Any, bucket: str
) -> None:
    async with running_store(database_url, blob_url=bucket) as store:
        stubs = await store.stubs()
        attempts = await ended_rollouts(stubs, 5)
        await spanned(stubs, attempts)
        before = await read_all(stubs, attempts)
        assert await rows(connection, "span_chunk") == 10

        await mover_of(database, bucket).run_once()

        assert await rows(connection, "span_chunk") == 0
        assert await rows(connection, "span_extent") == 5
        assert await rows(connection, "span_segment") == 1
        assert await read_all(stubs, attempts) == before
        assert len(before.streamed) == len(before.watched) == 10
        # Spans that come late lie in the table, beside the others.
        late = await spanned(stubs, attempts[:1], chunks=1)
        assert len(await stored(stubs, *attempts)) == 11
        await mover_of(database, bucket).run_once()
        assert await rows(connection, "span_chunk") == 0
        assert late[0].chunk_id in {chunk.chunk_id for chunk in await stored(stubs, *attempts)}


async def test_spans_of_a_training_run_are_streamed_from_segments(
    database_url: str, database: Database, bucket: str
) -> None:
    async with running_store(database_url, blob_url=bucket) as store:
        stubs = await store.stubs()
        run = "projects/default/trainingRuns/r"
        attempts = await ended_rollouts(stubs, 40, project="projects/default", training_run=run)
        chunks = await spanned(stubs, attempts)
        await mover_of(database, bucket).run_once()
        stream = stubs.spans.StreamSpans(pb.StreamSpansRequest(training_run=run))
        found = [chunk.chunk_id async for message in stream for chunk in message.chunks]
        assert sorted(found) == sorted(chunk.chunk_id for chunk in chunks)


async def test_what_has_not_ended_or_has_just_ended_stays_in_the_table(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, tmp_path: Any
) -> None:
    ended = await ended_rollouts(stubs, 2)
    (waiting,) = await create(stubs)
    runner = await Runner(stubs).open()
    (running,) = await runner.take(1)
    assert running.rollout.name == waiting
    await spanned(stubs, [*ended, running.attempt])
    url = f"file://{tmp_path}/blobs"

    await mover_of(database, url, after_s=3600.0).run_once()
    assert await rows(connection, "span_chunk") == 6

    await mover_of(database, url).run_once()
    left = {row["rollout_id"] for row in await connection.fetch("select rollout_id from span_chunk")}
    assert left == {parse_attempt_name(running.attempt).rollout_id}


async def test_a_day_that_is_not_over_gives_full_segments_and_keeps_the_rest(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, tmp_path: Any
) -> None:
    await spanned(stubs, await ended_rollouts(stubs, 10), chunks=1)
    size = await connection.fetchval("select max(length(payload)) from span_chunk")
    mover = mover_of(database, f"file://{tmp_path}/blobs", segment_bytes=4 * size, clock=Clock())

    await mover.run_once()

    assert await rows(connection, "span_segment") == 2
    assert await rows(connection, "span_chunk") == 2
    assert await connection.fetchval("select max(size_bytes) from span_segment") <= 4 * size
    await mover.run_once()
    assert await rows(connection, "span_chunk") == 2


async def test_each_project_has_segments_of_its_own(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, tmp_path: Any
) -> None:
    await connection.execute("insert into project (name) values ('projects/other')")
    for project in ("projects/default", "projects/other"):
        await spanned(stubs, await ended_rollouts(stubs, 3, project=project))
    await mover_of(database, f"file://{tmp_path}/blobs").run_once()
    found = await connection.fetch(
        "select s.project_id, count(*) from span_segment s join span_extent e on e.segment_id = s.id"
        " join rollout r on r.id = e.rollout_id and r.project_id = s.project_id group by 1"
    )
    assert [row["count"] for row in found] == [3, 3]


async def test_a_chunk_that_is_sent_again_after_it_was_moved_is_read_once(
    database_url: str, database: Database, bucket: str
) -> None:
    async with running_store(database_url, blob_url=bucket) as store:
        stubs = await store.stubs()
        chunks = await spanned(stubs, await ended_rollouts(stubs, 2))
        attempts = sorted({chunk.attempt for chunk in chunks})
        for _ in range(2):
            await mover_of(database, bucket).run_once()
            assert (await append(stubs, *chunks)).accepted_count == 4
            assert sorted(read.chunk_id for read in await stored(stubs, *attempts)) == sorted(
                chunk.chunk_id for chunk in chunks
            )


async def test_replicas_at_once_move_every_chunk_once(
    database_url: str, database: Database, connection: Any, bucket: str
) -> None:
    async with running_store(database_url, blob_url=bucket) as store:
        stubs = await store.stubs()
        attempts = await ended_rollouts(stubs, 30)
        await spanned(stubs, attempts)
        before = await read_all(stubs, attempts)
        size = await connection.fetchval("select sum(length(payload)) from span_chunk")

        for _ in range(3):
            await asyncio.gather(*(mover_of(database, bucket, segment_bytes=size // 5).run_once() for _ in range(3)))

        assert await rows(connection, "span_chunk") == 0
        live = "select sum(live_bytes) from span_segment where state = 2"
        assert await connection.fetchval(live) == size
        assert await read_all(stubs, attempts) == before


async def test_a_reader_that_was_between_finds_what_was_moved_meanwhile(
    database_url: str, database: Database, connection: Any, bucket: str
) -> None:
    async with running_store(database_url, blob_url=bucket) as store:
        stubs = await store.stubs()
        attempts = await ended_rollouts(stubs, 3)
        await spanned(stubs, attempts)
        table = table_of(database, bucket)
        parents = [
            SpanParent(project="projects/default", rollout_id=parse_attempt_name(attempt).rollout_id)
            for attempt in attempts
        ]
        in_table = [head for heads in await table.heads(parents) for head in heads]
        expected = {chunk.chunk_id: chunk.payload async for chunk in table.read(in_table)}
        assert len(expected) == 6

        await mover_of(database, bucket).run_once()
        assert {chunk.chunk_id: chunk.payload async for chunk in table.read(in_table)} == expected

        # Half of it dies: the rest goes into another segment, and the first one goes after a day.
        in_segment = [head for heads in await table.heads(parents) for head in heads]
        assert all(head.entry is not None for head in in_segment)
        await connection.execute("update span_segment set live_bytes = 1, dead_since = now()")
        await mover_of(database, bucket).run_once()
        await connection.execute("update span_segment set remove_at = now() where state = 3")
        await mover_of(database, bucket).run_once()
        assert await rows(connection, "span_segment") == 1
        assert {chunk.chunk_id: chunk.payload async for chunk in table.read(in_segment)} == expected


async def test_the_disk_of_a_day_comes_back_once_all_of_it_was_moved(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, tmp_path: Any
) -> None:
    attempts = await ended_rollouts(stubs, 20)
    await spanned(stubs, attempts, chunks=20)
    size = "select sum(pg_total_relation_size(inhrelid)) from pg_inherits where inhparent = 'span_chunk'::regclass"
    empty = await connection.fetchval(
        "select pg_total_relation_size('span_chunk_' || to_char(now() + '9 days', 'YYYYMMDD'))"
    )
    days = await rows(connection, "pg_inherits where inhparent = 'span_chunk'::regclass")
    assert await connection.fetchval(size) > empty * days
    mover = mover_of(database, f"file://{tmp_path}/blobs")

    await mover.run_once()
    # A dump that began before the move has a lock on the table, and finds the spans there.
    dump = connection.transaction(isolation="repeatable_read")
    await dump.start()
    await connection.fetchval("select count(*) from span_chunk")
    await mover.run_once()
    await dump.rollback()
    assert await connection.fetchval(size) > empty * days

    await mover.run_once()
    assert await connection.fetchval(size) == empty * days
    assert await mover_days(connection) == []
    # And the day takes spans as before.
    await spanned(stubs, attempts[:1])
    assert await rows(connection, "span_chunk") == 2


async def test_who_holds_the_large_values_of_a_day_alone_delays_its_disk_and_not_the_mover(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, tmp_path: Any
) -> None:
    await spanned(stubs, await ended_rollouts(stubs, 2))
    mover = mover_of(database, f"file://{tmp_path}/blobs")
    await mover.run_once()
    days = await mover_days(connection)
    assert len(days) == 1

    # As a vacuum of the TOAST table does, which PostgreSQL locks apart from its table.
    async with connection.transaction():
        await connection.fetch(f"select count(*) from {await toast_of(connection, days[0])}")
        await mover.run_once()
        assert await mover_days(connection) == days

    await mover.run_once()
    assert await mover_days(connection) == []


async def toast_of(connection: Any, day: Any) -> str:
    """Returns the table of a day's large values."""
    return str(
        await connection.fetchval(
            "select reltoastrelid::regclass::text from pg_class where oid = $1::text::regclass",
            f"span_chunk_{day:%Y%m%d}",
        )
    )


async def mover_days(connection: Any) -> list[Any]:
    """Returns the days that a pass looks at."""
    return [row[0] for row in await connection.fetch("select days_with_spans((now() + interval '2 days')::date)")]


async def test_ranges_of_an_object_come_alone_and_short_at_its_end(bucket: str) -> None:
    blobs = Blobs(open_storage(bucket))
    content = bytes(range(256)) * 4096
    await blobs.write("segments/x", content)
    ranges = [(0, 10), (500_000, MIB // 4), (10, 1)]
    assert list(await blobs.read_ranges("segments/x", ranges)) == [content[a : a + b] for a, b in ranges]
    assert list(await blobs.read_ranges("segments/x", [(2 * MIB, 10)])) == [b""]
