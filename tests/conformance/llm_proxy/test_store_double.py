"""The store that the proxy's tests use, and the real one: the proxy cannot tell them apart."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from fulmen.errors import ResourceNotFound
from fulmen.ids import parse_rollout_name, uuid7
from fulmen.llm_proxy.v1 import route_service_pb2
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import span_pb2, span_service_pb2, span_service_pb2_grpc
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_service_kit.tokens import Role, TokenSigner
from tests.integration.llm_proxy import harness
from tests.integration.llm_proxy.fake_store import FakeStore, batch_of
from tests.integration.llm_proxy.harness import MODEL, running_proxy, target
from tests.support import store as real
from tests.support.backend import Backend, reply_to, token_ids_of
from tests.support.postgres import shared_server

DEADLINE_S = 60


@dataclass(frozen=True, kw_only=True)
class World:
    """A store, of either kind."""

    target: str
    signing_key: str
    new_rollout: Callable[[], Awaitable[uuid.UUID]]
    read_chunks: Callable[[str], Awaitable[list[span_pb2.SpanChunk]]]

    def token(self) -> str:
        return TokenSigner(self.signing_key).issue(Role.SERVICE, subject="tests", ttl_s=600)


@pytest.fixture
async def double() -> AsyncIterator[World]:
    """Yields the double."""
    async with FakeStore() as store:

        async def new_rollout() -> uuid.UUID:
            return uuid7()

        async def read_chunks(attempt: str) -> list[span_pb2.SpanChunk]:
            return [chunk for chunk in store.chunks.values() if chunk.attempt == attempt]

        yield World(
            target=store.target, signing_key=harness.SIGNING_KEY, new_rollout=new_rollout, read_chunks=read_chunks
        )


@pytest.fixture
async def real_store() -> AsyncIterator[World]:
    """Yields a store on PostgreSQL."""
    server = shared_server()
    dsn = server.fresh_database()
    async with real.running_store(dsn) as handle:
        stubs = await handle.stubs()

        async def new_rollout() -> uuid.UUID:
            [name] = await real.create(stubs)
            return parse_rollout_name(name)

        async def read_chunks(attempt: str) -> list[span_pb2.SpanChunk]:
            stream = stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=[attempt]))
            return [chunk async for message in stream for chunk in message.chunks]

        yield World(
            target=handle.target, signing_key=real.SIGNING_KEY, new_rollout=new_rollout, read_chunks=read_chunks
        )
    server.drop(dsn)


@pytest.fixture(params=["double", "real_store"])
def world(request: pytest.FixtureRequest) -> World:
    """Returns one store after the other."""
    found: World = request.getfixturevalue(request.param)
    return found


async def test_a_captured_call_is_read_back_as_it_was_sampled(world: World) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        Backend() as backend,
        running_proxy(world.target, signing_key=world.signing_key) as proxy,
    ):
        await proxy.register("one", backend.url)
        await proxy.put_route(target("one", version=4))
        attempt, key = proxy.attempt(rollout_id=await world.new_rollout())
        for content in ("first", "second " * 400):
            assert (await proxy.chat(key, content))[0] == 200
        summary = await proxy.flush(attempt)
        chunks = await world.read_chunks(attempt)
    records = [ModelCallRecord.FromString(s.model_call) for c in chunks for s in batch_of(c).spans]
    assert (summary.flushed, summary.call_count, summary.unusable_count) == (True, 2, 0)
    assert [record.usable for record in records] == [True, True]
    expected = token_ids_of(reply_to([{"content": "first"}]))
    assert array("i", records[0].completion_token_ids).tolist() == expected
    assert [(r.version, r.start, r.end) for r in records[0].policy_versions] == [(4, 0, len(expected))]


async def test_routes_follow_their_resources_and_roll_back(world: World) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        Backend() as backend,
        running_proxy(world.target, signing_key=world.signing_key) as proxy,
        running_proxy(world.target, signing_key=world.signing_key) as replica,
    ):
        await proxy.register("one", backend.url)
        watch = replica.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest(), wait_for_ready=True)
        assert [(await proxy.put_route(target("one", version=v))).version for v in (1, 2)] == [1, 2]
        seen: list[int] = []
        while seen[-1:] != [2]:
            seen += [route.version for route in (await watch.read()).routes]
        back = await proxy.routes.RollBackRoute(route_service_pb2.RollBackRouteRequest(name=f"routes/{MODEL}"))
        assert (back.route.version, back.route.targets[0].policy_version) == (3, 1)
        with pytest.raises(ResourceNotFound):
            await proxy.routes.RollBackRoute(route_service_pb2.RollBackRouteRequest(name=f"routes/{MODEL}", version=99))
        watch.cancel()


async def test_a_chunk_that_comes_again_is_acknowledged_and_stored_once(world: World) -> None:
    attempt = f"rollouts/{await world.new_rollout()}/attempts/1"
    batch = span_pb2.SpanBatch(spans=[span_pb2.SpanRecord(otlp_span=b"", scope="tests")])
    chunk = span_pb2.SpanChunk(
        attempt=attempt,
        chunk_id=str(uuid7()),
        span_count=1,
        codec=span_pb2.SPAN_CODEC_IDENTITY,
        payload=batch.SerializeToString(),
    )
    chunk.start_time.GetCurrentTime()
    chunk.end_time.CopyFrom(chunk.start_time)
    async with asyncio.timeout(DEADLINE_S), open_channel(world.target, token=world.token()) as channel:
        stream = span_service_pb2_grpc.SpanServiceStub(channel).AppendSpans()
        for _ in range(2):
            await stream.write(span_service_pb2.AppendSpansRequest(chunks=[chunk]))
            answer = await stream.read()
            assert (answer.accepted_count, len(answer.rejected)) == (1, 0)
        stream.cancel()
    assert [c.chunk_id for c in await world.read_chunks(attempt)] == [chunk.chunk_id]
