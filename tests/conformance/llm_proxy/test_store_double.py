"""The store that the proxy's tests use, and the real one: the proxy cannot tell them apart."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from fulmen.errors import ResourceNotFound
from fulmen.ids import DEFAULT_PROJECT, parse_rollout_name, uuid7
from fulmen.llm_proxy.v1 import route_service_pb2
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import (
    attempt_pb2,
    lease_pb2,
    lease_service_pb2,
    lease_service_pb2_grpc,
    rollout_pb2,
    span_pb2,
    span_service_pb2,
    span_service_pb2_grpc,
)
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.llm_proxy import harness
from tests.support.llm_proxy.backend import Backend, reply_to, token_ids_of
from tests.support.llm_proxy.fake_store import FakeStore, batch_of
from tests.support.llm_proxy.harness import MODEL, running_proxy, target
from tests.support.store import running as real

DEADLINE_S = 60


@dataclass(frozen=True, kw_only=True)
class World:
    """A store, of either kind."""

    target: str
    signing_key: str
    new_rollout: Callable[[], Awaitable[uuid.UUID]]
    """Makes a rollout whose first attempt runs."""
    end_attempt: Callable[[str], Awaitable[None]]
    read_chunks: Callable[[str], Awaitable[list[span_pb2.SpanChunk]]]

    def token(self) -> str:
        return TokenSigner(self.signing_key).issue(Role.SERVICE, subject="tests", ttl_s=600)


@pytest.fixture
async def double() -> AsyncIterator[World]:
    """Yields the double."""
    async with FakeStore() as store:

        async def new_rollout() -> uuid.UUID:
            return uuid7()

        async def end_attempt(attempt: str) -> None:
            state = attempt_pb2.ATTEMPT_STATE_SUCCEEDED
            store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED, state=state)

        async def read_chunks(attempt: str) -> list[span_pb2.SpanChunk]:
            return [chunk for chunk in store.chunks.values() if chunk.attempt == attempt]

        yield World(
            target=store.target,
            signing_key=harness.SIGNING_KEY,
            new_rollout=new_rollout,
            end_attempt=end_attempt,
            read_chunks=read_chunks,
        )


@pytest.fixture
async def real_store(database_url: str) -> AsyncIterator[World]:
    """Yields a store on PostgreSQL."""
    async with real.running_store(database_url) as handle:
        stubs = await handle.stubs()
        runner = await real.Runner(stubs).open()
        held: dict[str, lease_pb2.Assignment] = {}

        async def new_rollout() -> uuid.UUID:
            await real.create(stubs)
            [assignment] = await runner.take(1)
            held[assignment.attempt] = assignment
            return parse_rollout_name(assignment.rollout.name).rollout_id

        async def end_attempt(attempt: str) -> None:
            await runner.complete([held.pop(attempt)])

        async def read_chunks(attempt: str) -> list[span_pb2.SpanChunk]:
            stream = stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=[attempt]))
            return [chunk async for message in stream for chunk in message.chunks]

        yield World(
            target=handle.target,
            signing_key=real.SIGNING_KEY,
            new_rollout=new_rollout,
            end_attempt=end_attempt,
            read_chunks=read_chunks,
        )


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


async def test_one_replica_acts_on_what_another_has_published(world: World) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        running_proxy(world.target, signing_key=world.signing_key) as one,
        running_proxy(world.target, signing_key=world.signing_key) as other,
    ):
        for number in range(10):
            await one.register(f"b{number}", "http://127.0.0.1:1/v1")
            await other.put_route(target(f"b{number}"), model=f"m{number}")
            name = f"routes/m{number}"
            await one.routes.SplitTraffic(
                route_service_pb2.SplitTrafficRequest(name=name, weights={f"backends/b{number}": 3})
            )
            await other.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name=name))


async def test_routes_follow_their_resources_and_rollback(world: World) -> None:
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
        back = await proxy.routes.RollbackRoute(route_service_pb2.RollbackRouteRequest(name=f"routes/{MODEL}"))
        assert (back.route.version, back.route.targets[0].policy_version) == (3, 1)
        with pytest.raises(ResourceNotFound):
            await proxy.routes.RollbackRoute(route_service_pb2.RollbackRouteRequest(name=f"routes/{MODEL}", version=99))
        watch.cancel()


async def test_a_chunk_that_comes_again_is_acknowledged_and_stored_once(world: World) -> None:
    attempt = f"projects/default/rollouts/{await world.new_rollout()}/attempts/1"
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


async def test_attempts_stand_the_same_while_they_run_and_when_they_have_ended(world: World) -> None:
    attempt = f"projects/default/rollouts/{await world.new_rollout()}/attempts/1"
    answers = []
    async with asyncio.timeout(DEADLINE_S), open_channel(world.target, token=world.token()) as channel:
        leases = lease_service_pb2_grpc.LeaseServiceStub(channel)
        for ended in (False, True):
            if ended:
                await world.end_attempt(attempt)
            checks = [lease_service_pb2.AttemptCheck(attempt=attempt, epoch=epoch) for epoch in (0, 1, 2)][
                : 2 + (not ended)
            ]
            answer = await leases.CheckAttempts(lease_service_pb2.CheckAttemptsRequest(attempts=checks))
            answers += [(s.status, s.state, s.project, s.mode, s.current_epoch, s.attempt) for s in answer.results]
    live, stale, over = (
        getattr(lease_service_pb2, f"ATTEMPT_STATUS_{name}") for name in ("LIVE", "STALE_EPOCH", "ENDED")
    )
    running = (attempt_pb2.ATTEMPT_STATE_RUNNING, DEFAULT_PROJECT, rollout_pb2.ROLLOUT_MODE_TRAIN, 1, attempt)
    ended_well = (attempt_pb2.ATTEMPT_STATE_SUCCEEDED, DEFAULT_PROJECT, rollout_pb2.ROLLOUT_MODE_TRAIN, 0, attempt)
    assert answers == [(live, *running)] * 2 + [(stale, *running)] + [(over, *ended_well)] * 2


async def test_an_attempt_that_has_ended_makes_no_more_calls(world: World) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        Backend() as backend,
        running_proxy(world.target, signing_key=world.signing_key) as proxy,
    ):
        await proxy.register("one", backend.url)
        await proxy.put_route(target("one"))
        attempt, key = proxy.attempt(rollout_id=await world.new_rollout())
        assert (await proxy.chat(key))[0] == 200
        await world.end_attempt(attempt)
        while (answer := await proxy.chat(key))[0] == 200:
            pass
    assert (answer[0], answer[1]["error"]["code"]) == (403, "attempt_over")
