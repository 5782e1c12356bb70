"""Writers that die, storages that are away, and segments that are damaged: nothing is lost twice and nothing stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fulmen.errors import BlobMissing, BlobStorageUnavailable
from fulmen.ids import parse_attempt_name
from fulmen.store.v1 import rollout_selection_pb2 as pb
from fulmen_store.database.database import Database
from fulmen_store.spans.blobs import Blobs
from fulmen_store.spans.table import SpanParent
from tests.support.object_store import S3
from tests.support.store.process import StoreProcess
from tests.support.store.running import LIMIT_S, StoreHandle, Stubs, running_store
from tests.support.store.segments import Counted, ended_rollouts, files_in, mover_of, rows, spanned, table_of
from tests.support.store.spans import stored

LONG_AGO = "update span_segment set claimed_at = now() - interval '11 minutes' where state = 1"
DUE = "update span_segment set remove_at = now() where state = 3"


async def ids_of(stubs: Stubs, attempts: list[str]) -> list[str]:
    """Returns the ids of the chunks that a reader gets."""
    return sorted(chunk.chunk_id for chunk in await stored(stubs, *attempts))


async def test_a_store_that_is_killed_between_object_and_commit_loses_nothing_and_leaves_nothing(
    store: StoreHandle, stubs: Stubs, database: Database, connection: Any, database_url: str, tmp_path: Path
) -> None:
    folder, url = tmp_path / "blobs", f"file://{tmp_path}/blobs"
    attempts = await ended_rollouts(stubs, 3)
    expected = sorted(chunk.chunk_id for chunk in await spanned(stubs, attempts))
    # Whoever takes chunks out of the table waits for this lock; the object is written before.
    holder = await asyncpg.connect(database_url)
    await holder.execute("begin")
    await holder.execute("select from span_chunk for update")
    size = await connection.fetchval("select sum(length(payload)) from span_chunk")
    process = StoreProcess(
        database_url, tmp_path, FULMEN_STORE_BLOB_URL=url, FULMEN_STORE_SEGMENT_BYTES=str(size),
        FULMEN_STORE_SEGMENT_AFTER_S="0",
    )  # fmt: skip
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            while not any(not path.name.startswith(".") for path in files_in(folder)):  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.02)
    finally:
        process.kill()
    await holder.close()

    (orphan,) = files_in(folder)
    assert await ids_of(stubs, attempts) == expected
    assert (await rows(connection, "span_chunk"), await rows(connection, "span_extent")) == (6, 0)
    # Nobody knows yet that the writer is dead.
    await mover_of(database, url).run_once()
    assert await rows(connection, "span_chunk") == 6

    await connection.execute(LONG_AGO)
    await mover_of(database, url).run_once()
    assert await rows(connection, "span_chunk") == 0
    await connection.execute(DUE)
    await mover_of(database, url).run_once()
    assert orphan not in files_in(folder)
    assert len(files_in(folder)) == await rows(connection, "span_segment") == 1
    async with running_store(database_url, blob_url=url) as reader:
        assert await ids_of(await reader.stubs(), attempts) == expected


async def test_a_writer_whose_claim_was_given_up_commits_nothing_and_takes_its_object_away(
    store: StoreHandle,
    stubs: Stubs,
    database: Database,
    connection: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"file://{tmp_path}/blobs"
    await spanned(stubs, await ended_rollouts(stubs, 2))
    write = Blobs.write

    async def slow_write(self: Blobs, *arguments: Any, **settings: Any) -> None:
        await write(self, *arguments, **settings)
        await connection.execute(LONG_AGO)
        await connection.execute("update span_segment set state = 3, remove_at = now()")

    monkeypatch.setattr(Blobs, "write", slow_write)
    await mover_of(database, url).run_once()
    assert (await rows(connection, "span_chunk"), await rows(connection, "span_extent")) == (4, 0)
    assert files_in(tmp_path / "blobs") == []


async def test_rollouts_that_are_deleted_while_they_are_moved_are_gone(
    store: StoreHandle,
    stubs: Stubs,
    database: Database,
    connection: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = await ended_rollouts(stubs, 3)
    await spanned(stubs, attempts)
    write = Blobs.write

    async def delete_one(self: Blobs, *arguments: Any, **settings: Any) -> None:
        await write(self, *arguments, **settings)
        names = [attempts[0].rpartition("/attempts/")[0]]
        await stubs.rollouts.DeleteRollouts(pb.DeleteRolloutsRequest(names=names))

    monkeypatch.setattr(Blobs, "write", delete_one)
    await mover_of(database, f"file://{tmp_path}/blobs").run_once()

    assert (await rows(connection, "span_chunk"), await rows(connection, "span_extent")) == (0, 2)
    row = await connection.fetchrow("select live_bytes < size_bytes as is_less, dead_since from span_segment")
    assert row["is_less"]
    assert row["dead_since"] is not None


async def test_a_storage_that_is_away_stops_no_append_and_readers_are_told_to_come_again(
    database_url: str, database: Database, connection: Any, s3: S3
) -> None:
    url = "s3://bucket/p"
    async with running_store(database_url, blob_url=url) as store:
        stubs = await store.stubs()
        moved, kept = (await ended_rollouts(stubs, 1))[0], (await ended_rollouts(stubs, 1))[0]
        before = await spanned(stubs, [moved])
        await mover_of(database, url).run_once()
        s3.is_broken = True

        after = await spanned(stubs, [kept])
        assert await ids_of(stubs, [kept]) == sorted(chunk.chunk_id for chunk in after)
        with pytest.raises(BlobStorageUnavailable) as caught:
            await stored(stubs, moved)
        assert "127.0.0.1" not in str(caught.value)
        with pytest.raises(BlobStorageUnavailable):
            await mover_of(database, url).run_once()
        assert await rows(connection, "span_chunk") == 2

        s3.is_broken = False
        assert await ids_of(stubs, [moved]) == sorted(chunk.chunk_id for chunk in before)
        await mover_of(database, url).run_once()
        assert await rows(connection, "span_chunk") == 0
        assert await ids_of(stubs, [kept]) == sorted(chunk.chunk_id for chunk in after)


async def test_a_damaged_chunk_is_counted_and_its_neighbours_are_read(
    database_url: str, database: Database, connection: Any, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/blobs"
    async with running_store(database_url, blob_url=url) as store:
        stubs = await store.stubs()
        attempts = await ended_rollouts(stubs, 4)
        expected = sorted(chunk.chunk_id for chunk in await spanned(stubs, attempts))
        await mover_of(database, url).run_once()
        (segment,) = files_in(tmp_path / "blobs")
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 1
        segment.write_bytes(content)

        left = await ids_of(stubs, attempts)
        assert len(left) == len(expected) - 1
        assert set(left) < set(expected)
        counted = Counted()
        table = table_of(database, url, counted)
        parents = [
            SpanParent(project="projects/default", rollout_id=parse_attempt_name(a).rollout_id) for a in attempts
        ]
        heads = [head for found in await table.heads(parents) for head in found]
        assert [str(chunk.chunk_id) async for chunk in table.read(heads)]
        assert counted.unreadable == 1
        # A segment that is not whole is not written anew.
        await connection.execute("update span_segment set live_bytes = 1, dead_since = now()")
        await mover_of(database, url).run_once()
        assert files_in(tmp_path / "blobs") == [segment]

        segment.unlink()
        assert await ids_of(stubs, attempts) == []
        await mover_of(database, url).run_once()
        others = await ended_rollouts(stubs, 1)
        await spanned(stubs, others)
        await mover_of(database, url).run_once()
        assert len(await ids_of(stubs, [*attempts, *others])) == 2


async def test_a_store_without_the_storage_says_so(
    store: StoreHandle, stubs: Stubs, database: Database, tmp_path: Path
) -> None:
    attempts = await ended_rollouts(stubs, 1)
    await spanned(stubs, attempts)
    await mover_of(database, f"file://{tmp_path}/blobs").run_once()
    with pytest.raises(BlobMissing, match="none is configured for this store"):
        await stored(stubs, *attempts)
