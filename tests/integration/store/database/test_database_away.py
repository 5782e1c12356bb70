"""PostgreSQL restarted, held still, full or read-only: the store lives, answers at once, says so, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager

import asyncpg
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from fulmen.errors import Unavailable
from fulmen.rpc.status import decode
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2_grpc
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.postgres import PostgresServer
from tests.support.store.running import Runner, StoreHandle, create, get, running_store

LIMIT_S = 60.0
# Below what any statement or connection may take: who is answered within it was not kept waiting by PostgreSQL.
AT_ONCE_S = 9.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LIVENESS, READINESS, ONE_SERVICE = "", "fulmen.store.v1", "fulmen.store.v1.RolloutService"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Yields a PostgreSQL of these tests alone; each leaves it as it was."""
    own = PostgresServer(embedded=True)
    yield own
    own.stop()


class Outside:
    """Looks at a store as a probe and a client that never tries twice."""

    def __init__(self, store: StoreHandle, channel: grpc.aio.Channel) -> None:
        self.health = health_pb2_grpc.HealthStub(channel)
        self._rollouts = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {store.token()}"),)

    async def status(self, name: str) -> int:
        """Returns the health of a name."""
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=AT_ONCE_S)
        return int(answer.status)

    async def until(self, status: int) -> None:
        """Waits until the readiness is so."""
        async with asyncio.timeout(LIMIT_S):
            while await self.status(READINESS) != status:  # noqa: ASYNC110  # health of the store under test
                await asyncio.sleep(0.02)

    async def ask(self) -> None:
        """Asks something that needs the database, once.

        Raises:
            FulmenError: what the store answered.
        """
        try:
            await self._rollouts.GetQueueStats(pb.GetQueueStatsRequest(), timeout=AT_ONCE_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise decode(error) from None

    async def is_away(self) -> None:
        """Checks everything that the store says while its database is away."""
        with pytest.raises(Unavailable) as caught:
            await self.ask()
        assert caught.value.reason == "DATABASE_UNAVAILABLE"
        assert [await self.status(name) for name in (LIVENESS, READINESS, ONE_SERVICE)] == [
            SERVING,
            NOT_SERVING,
            NOT_SERVING,
        ]


@pytest.fixture
async def watched(server: PostgresServer) -> AsyncIterator[tuple[StoreHandle, Outside]]:
    """Yields a store on a PostgreSQL of its own, and a look at it from outside."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(server.fresh_database(), lease_ttl_s=60.0))
        await store.parts.server.set_serving(True)
        channel = grpc.aio.insecure_channel(store.target, options=(("grpc.enable_retries", 0),))
        await stack.enter_async_context(channel)
        yield store, Outside(store, channel)


Watched = tuple[StoreHandle, Outside]


async def test_a_killed_database_is_told_at_once_and_found_again(server: PostgresServer, watched: Watched) -> None:
    store, outside = watched
    stubs = await store.stubs()
    runner = await Runner(stubs).open()
    (before,) = await create(stubs)
    assignments = await runner.take(1)
    await outside.until(SERVING)
    with capture_logs() as lines:
        server.embedded.kill()
        await outside.until(NOT_SERVING)
        await outside.is_away()
        await asyncio.to_thread(server.embedded.start)
        await outside.until(SERVING)
    told = [line["event"] for line in lines if line["event"].startswith("database_")]
    assert told == ["database_lost", "database_back"]
    await outside.ask()
    assert await runner.complete(assignments) == [1]
    assert (await get(stubs, before)).state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED


async def test_a_database_that_stands_still_keeps_nobody_waiting(server: PostgresServer, watched: Watched) -> None:
    _, outside = watched
    await outside.until(SERVING)
    with ExitStack() as still:
        # What forks first: no connection is opened after the others are known.
        still.enter_context(_held_still(_postmaster(server)))
        for child in _postmaster(server).children(recursive=True):
            still.enter_context(_held_still(child))
        under_way = [asyncio.create_task(outside.ask()) for _ in range(8)]
        for answer in await asyncio.gather(*under_way, return_exceptions=True):
            assert isinstance(answer, Unavailable)
        await outside.until(NOT_SERVING)
        await outside.is_away()
    await outside.until(SERVING)
    await outside.ask()


async def test_a_postmaster_that_stands_still_does_not_matter_to_those_who_are_connected(
    server: PostgresServer, watched: Watched
) -> None:
    _, outside = watched
    await outside.until(SERVING)
    await outside.ask()
    with _held_still(_postmaster(server)):
        for _ in range(5):
            await outside.ask()
        assert await outside.status(READINESS) == SERVING


async def test_one_ended_connection_is_no_lost_database(server: PostgresServer, watched: Watched) -> None:
    store, outside = watched
    stubs = await store.stubs()
    await outside.until(SERVING)
    with capture_logs() as lines:
        for _ in range(3):
            await _administrate(server, _end_the_stores_connections)
            # The client's own retries go through as soon as a connection is open again.
            assert await create(stubs)
    assert not [line for line in lines if line["event"] == "database_lost"]


async def test_a_full_database_is_told_and_found_again_when_there_is_room(
    server: PostgresServer, watched: Watched
) -> None:
    _, outside = watched
    await outside.until(SERVING)
    async with AsyncExitStack() as crowd:
        first = await _visitor(server, crowd)
        # Ends the store's connections and takes their places until there is none left for it.
        async with asyncio.timeout(LIMIT_S):
            while await outside.status(READINESS) == SERVING:
                await _fill(server, crowd)
                await first.execute(_END_STORE)
        await _fill(server, crowd)
        await outside.is_away()
    await outside.until(SERVING)
    await outside.ask()


async def test_a_database_that_takes_no_writes_is_away(server: PostgresServer, watched: Watched) -> None:
    store, outside = watched
    stubs = await store.stubs()
    await outside.until(SERVING)
    await _administrate(server, lambda connection: _set_read_only(connection, "on"))
    await outside.until(NOT_SERVING)
    await outside.is_away()
    await _administrate(server, lambda connection: _set_read_only(connection, "off"))
    await outside.until(SERVING)
    assert await create(stubs)


_NO_SPACE = """
create function no_space() returns trigger language plpgsql as
$$ begin raise exception using errcode = 'disk_full', message = 'could not extend file: No space left on device'; end $$;
create trigger no_space before insert on rollout execute function no_space();
"""


async def test_a_database_without_space_is_told_and_what_it_refuses_is_tried_again(server: PostgresServer) -> None:
    dsn = server.fresh_database()
    connection = await asyncpg.connect(dsn)
    async with running_store(dsn) as store:
        stubs = await store.stubs()
        await connection.execute(_NO_SPACE)
        with capture_logs() as lines:
            creating = asyncio.create_task(create(stubs))
            async with asyncio.timeout(LIMIT_S):
                while not any(line["event"] == "database_full" for line in lines):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())  # It still reads.
            await connection.execute("drop function no_space() cascade")
            assert await creating
    await connection.close()
    refused = {line["reason"] for line in lines if line.get("code") == "UNAVAILABLE"}
    assert refused == {"DATABASE_UNAVAILABLE"}
    assert [line["event"] for line in lines if line["event"].startswith("database_")] == ["database_full"]


async def test_a_store_that_drains_is_not_ready_whatever_its_database_is(watched: Watched) -> None:
    store, outside = watched
    await outside.until(SERVING)
    await store.parts.server.set_serving(False)
    await store.parts.drain()
    await store.parts.server.publish_readiness()  # as the watch of the database does, which is there
    assert [await outside.status(name) for name in (LIVENESS, READINESS)] == [NOT_SERVING, NOT_SERVING]


_END_STORE = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'fulmen-store'"


async def _administrate(server: PostgresServer, work: Callable[[asyncpg.Connection], Awaitable[None]]) -> None:
    connection = await asyncpg.connect(server.embedded.dsn)
    try:
        await work(connection)
    finally:
        await connection.close()


async def _end_the_stores_connections(connection: asyncpg.Connection) -> None:
    await connection.execute(_END_STORE)


async def _set_read_only(connection: asyncpg.Connection, value: str) -> None:
    await connection.execute("set default_transaction_read_only = off")
    await connection.execute(f"alter system set default_transaction_read_only = {value}")
    await connection.execute("select pg_reload_conf()")


async def _visitor(server: PostgresServer, crowd: AsyncExitStack) -> asyncpg.Connection:
    connection = await asyncpg.connect(server.embedded.dsn)
    crowd.push_async_callback(connection.close)
    return connection


async def _fill(server: PostgresServer, crowd: AsyncExitStack) -> None:
    try:
        while True:
            await _visitor(server, crowd)
    except asyncpg.TooManyConnectionsError:
        return


def _postmaster(server: PostgresServer) -> psutil.Process:
    assert server.embedded is not None
    pid = server.embedded._postmaster_pid()
    assert pid is not None
    return psutil.Process(pid)


@contextmanager
def _held_still(process: psutil.Process) -> Iterator[None]:
    """Stops a process, which has stopped when the block begins."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        until = time.monotonic() + LIMIT_S
        while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            assert time.monotonic() < until
            time.sleep(0.001)
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)
