"""A dump that is restored into another server goes on: nothing that was committed is missing, and feeds move.

The other server is a fresh one, whose transaction counter is far behind the numbers in the dump.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from fulmen.store.v1 import attempt_pb2, failure_pb2, resource_pb2, rollout_pb2
from fulmen.store.v1 import resource_service_pb2 as res
from fulmen.store.v1.span_service_pb2 import AppendSpansRequest
from fulmen_cli.local.postgres import find_binaries
from fulmen_store.database.migrations import catch_up
from tests.support.postgres import PostgresServer
from tests.support.store.rollouts import renewing
from tests.support.store.running import Runner, create, get, read_feed, running_store
from tests.support.store.spans import chunk_of, stored

LIMIT_S = 60
USED_UP = 300_000
# psql of the newest release writes settings that an older server does not know; nothing else may go wrong.
HARMLESS = "unrecognized configuration parameter"
AGAIN = rollout_pb2.RolloutPolicy(max_attempts=3)


@pytest.fixture
def other_server() -> Iterator[PostgresServer]:
    """Yields a server that was just made."""
    server = PostgresServer()
    yield server
    server.stop()


def dumped(dsn: str, file: Path) -> None:
    """Dumps a database as docs/backup.md says."""
    command = [find_binaries() / "pg_dump", f"--dbname={dsn}", "--no-owner", f"--file={file}"]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)


def restored(file: Path, dsn: str) -> None:
    """Restores it into an empty one."""
    command = [find_binaries() / "psql", f"--dbname={dsn}", "--quiet", "--no-psqlrc", f"--file={file}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    problems = [line for line in done.stderr.splitlines() if "ERROR" in line and HARMLESS not in line]
    assert problems == []


async def counter_of(dsn: str) -> int:
    """Returns the next transaction number of a database's server."""
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))
    finally:
        await connection.close()


async def use_up(dsn: str, count: int) -> None:
    """Takes transaction numbers of a server, so that it is older than another."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("create temporary table gone (number int) on commit delete rows")
        await connection.execute(
            f"do $$ begin for i in 1..{count} loop begin insert into gone values (1); "
            "exception when others then raise; end; end loop; end $$"
        )
    finally:
        await connection.close()


async def test_a_dump_goes_on_in_a_younger_server(
    database_url: str, other_server: PostgresServer, tmp_path: Path
) -> None:
    await use_up(database_url, USED_UP)
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        version = resource_pb2.ResourceVersion(name="resources/prompt.x", kind="prompt", content=b"be brief")
        await stubs.resources.PublishResources(res.PublishResourcesRequest(resources=[version]))
        names = await create(stubs, 4, policy=AGAIN)
        runner = await Runner(stubs).open()
        done, running = await runner.take(2)
        chunks = stubs.spans.AppendSpans()
        await chunks.write(AppendSpansRequest(chunks=[chunk_of(done.attempt, 3)]))
        await chunks.read()
        await runner.complete([done])
        feed, cursor = await read_feed(stubs, groups=1)
        await asyncio.to_thread(dumped, database_url, tmp_path / "dump.sql")
    other = other_server.fresh_database(migrated=False)
    await asyncio.to_thread(restored, tmp_path / "dump.sql", other)
    assert await counter_of(other) < USED_UP

    async with running_store(other) as store:
        stubs = await store.stubs()
        assert [group.rollouts[0].name for group in (await read_feed(stubs, groups=1))[0]] == [
            group.rollouts[0].name for group in feed
        ]
        assert sum(chunk.span_count for chunk in await stored(stubs, done.attempt)) == 3
        found = await stubs.resources.GetResources(res.GetResourcesRequest(names=["resources/prompt.x/versions/1"]))
        assert found.resources[0].content == b"be brief"
        async with renewing(await Runner(stubs).open()) as runner:
            # One of them ran when the dump was made: its runner is gone, and its lease ends.
            await runner.complete(await runner.take(3))
        later, _ = await read_feed(stubs, groups=3, cursor=cursor)
        assert {group.rollouts[0].name for group in later} == set(names) - {done.rollout.name}
        first, second = (await get(stubs, running.rollout.name)).attempts
        assert (first.failure_kind, second.state) == (
            failure_pb2.FAILURE_KIND_LEASE_LOST,
            attempt_pb2.ATTEMPT_STATE_SUCCEEDED,
        )
    assert await counter_of(other) > USED_UP


async def test_catching_up_tells_how_far_it_is_and_leaves_a_server_that_is_old_enough(
    database_url: str, connection: asyncpg.Connection
) -> None:
    before = await counter_of(database_url)
    # The server's other databases and its own upkeep take numbers meanwhile: only those of this transaction count.
    async with connection.transaction():
        assert await catch_up(connection) == 0
        assert await connection.fetchval("select pg_current_xact_id_if_assigned()::text") is None
    ahead = before + 700_000
    await connection.execute(
        "insert into resource (project_id, name, kind) values ((select min(id) from project), 'from-a-dump', 'bundle')"
    )
    await connection.execute(
        "insert into resource_version (resource_id, version, content_type, content, sha256, parent, metadata, xid) "
        "select id, 1, '', '', sha256(''), '', '', $1::bigint::text::xid8 from resource where name = 'from-a-dump'",
        ahead,
    )
    told: list[tuple[int, int]] = []
    taken = await catch_up(connection, on_progress=lambda done, all_of_them: told.append((done, all_of_them)))
    assert await counter_of(database_url) > ahead
    assert told == [(500_000, taken), (taken, taken)]
