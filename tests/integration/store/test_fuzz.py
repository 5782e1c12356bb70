"""Whatever is sent to any rpc or to the OTLP port, the store lives on, answers by an error of the catalogue or well, and betrays nothing.

The seed is printed; FULMEN_TEST_SEED repeats a run, and FULMEN_TEST_SOAK=20 makes it as many times longer. `make fuzz` does the
same to all services, for as long as it is told to.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from fulmen.errors import FulmenError, MessageTooLarge, PermissionDenied
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.security.permissions import Scope, rule
from fulmen_service_kit.security.tokens import Role
from tests.fuzz.live import http, rpc
from tests.fuzz.mutation import MAX_BYTES
from tests.fuzz.world import LiveTarget, LiveWorld, furnish, tokens_of
from tests.support import soak
from tests.support.store.rpcs import Outcome, exchange, listed_rpcs
from tests.support.store.running import LIMIT_S, SIGNING_KEY, StoreHandle, create, running_store

SEED = soak.seed()
MESSAGE_LIMIT_BYTES = 64 * 1024

bounded = settings(
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Fuzzed:
    """A running store with two projects, called from a test that is not a coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, world: LiveWorld) -> None:
        self._loop = loop
        self.world = world

    def fuzz(self, target: LiveTarget, seeds: Sequence[bytes], count: int) -> None:
        """Sends so many changed inputs."""
        rng = random.Random(SEED)
        for _ in range(count):
            data = rng.choice(seeds)
            for _ in range(rng.choice((0, 1, 3))):
                data = target.mutate(self.world, data, rng)[:MAX_BYTES]
            self._loop.run_until_complete(target.send(self.world, data))

    def send(
        self, path: str, payload: bytes, metadata: Sequence[tuple[str, Any]], *, timeout_s: float = rpc.PATIENCE_S
    ) -> Outcome:
        """Sends a raw message and checks what comes back."""
        return self._loop.run_until_complete(self._sent(path, payload, metadata, timeout_s))

    def send_all(self, paths: Sequence[str], payload: bytes, metadata: Sequence[tuple[str, Any]]) -> dict[str, Outcome]:
        """Sends a raw message to several rpcs at once, since refusals come late; checks what comes back."""

        async def sent() -> list[Outcome]:
            return await asyncio.gather(*(self._sent(path, payload, metadata, LIMIT_S) for path in paths))

        return dict(zip(paths, self._loop.run_until_complete(sent()), strict=True))

    async def _sent(self, path: str, payload: bytes, metadata: Sequence[tuple[str, Any]], timeout_s: float) -> Outcome:
        channel, called = self.world.rpcs[path]
        outcome = await exchange(channel, called, [payload], metadata=metadata, answers=1, timeout_s=timeout_s)
        rpc.check(path, outcome)
        return outcome


@pytest.fixture(scope="module")
def target() -> Iterator[Fuzzed]:
    """Yields a store that has something of everything in the projects a and b."""
    from tests.support.postgres import shared_server

    server = shared_server()
    dsn = server.fresh_database()
    print(f"{soak.SEED_VARIABLE}={SEED}")
    with asyncio.Runner() as runner:
        context = running_store(dsn, max_message_bytes=MESSAGE_LIMIT_BYTES, auth_failures_per_minute=0)
        handle = runner.run(context.__aenter__())
        try:
            yield Fuzzed(runner.get_loop(), runner.run(_world(handle)))
            runner.run(_still_serves(handle))
        finally:
            runner.run(context.__aexit__(None, None, None))
    server.drop(dsn)


async def _world(handle: StoreHandle) -> LiveWorld:
    session = await handle.stack.enter_async_context(aiohttp.ClientSession())
    ports = {"store": handle.port, "store_http": handle.parts.ports["http_port"]}
    world = LiveWorld(http=session, ports=ports, tokens=tokens_of(SIGNING_KEY))
    await furnish(world, await handle.stubs())
    channel = await handle.stack.enter_async_context(grpc.aio.insecure_channel(handle.target))
    world.rpcs = {path: (channel, called) for path, called in (await listed_rpcs(channel)).items()}
    return world


async def _still_serves(handle: StoreHandle) -> None:
    stubs = await handle.stubs()
    assert await create(stubs)
    await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())


def bearer(target: Fuzzed, role: str) -> tuple[str, str]:
    """Returns the metadata of a token of project a."""
    return "authorization", f"Bearer {target.world.tokens[role]}"


def test_no_message_and_no_bytes_break_an_rpc(target: Fuzzed) -> None:
    target.fuzz(rpc.TARGET, rpc.seeds(target.world), 500 * soak.SOAK)


def test_nothing_breaks_the_otlp_port(target: Fuzzed) -> None:
    seeds = [data for data in http.seeds(target.world) if data.startswith(b"OTLP")]
    target.fuzz(http.TARGET, seeds, 150 * soak.SOAK)


header_text = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=120)
good_token = f"Bearer {tokens_of(SIGNING_KEY)['admin']}"
authorizations = st.one_of(
    header_text,
    header_text.map(lambda text: f"Bearer {text}"),
    st.integers(0, len(good_token)).map(lambda place: good_token[:place]),
    st.tuples(st.integers(7, len(good_token) - 1), st.sampled_from("aA0._-= ")).map(
        lambda change: good_token[: change[0]] + change[1] + good_token[change[0] + 1 :]
    ),
    st.just(good_token.replace("Bearer", "bearer")),
)
other_headers = st.lists(
    st.tuples(
        st.sampled_from(["traceparent", "tracestate", "baggage", "x-anything", "grpc-trace"]),
        header_text | st.just("00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
    )
    | st.tuples(st.sampled_from(["grpc-trace-bin", "x-bin"]), st.binary(max_size=40)),
    max_size=3,
)


@seed(SEED)
@settings(bounded, max_examples=40 * soak.SOAK)
@given(data=st.data(), authorization=st.none() | authorizations, others=other_headers)
def test_no_metadata_breaks_an_rpc(
    target: Fuzzed, data: st.DataObject, authorization: str | None, others: list[tuple[str, Any]]
) -> None:
    path = data.draw(st.sampled_from(sorted(target.world.rpcs)))
    metadata = others + ([("authorization", authorization)] if authorization is not None else [])
    target.send(path, b"", metadata)


def test_what_is_too_large_is_refused_by_every_rpc(target: Fuzzed) -> None:
    payload = b"\x0a" + b"\xff" * (MESSAGE_LIMIT_BYTES + 1)
    outcomes = target.send_all(list(target.world.rpcs), payload, [bearer(target, "admin")])
    for path, outcome in outcomes.items():
        # What the caller may not call is not read.
        is_read = rule(path).allows(Role.ADMIN) and rule(path).scope is Scope.PROJECT
        assert isinstance(outcome, MessageTooLarge if is_read else PermissionDenied), (path, outcome)


def test_a_thousand_problems_are_told_in_an_answer_that_arrives(target: Fuzzed) -> None:
    path = "/fulmen.store.v1.RolloutService/BatchCreateRollouts"
    bad = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(name="☃" * 20, priority=999)] * 600)
    outcome = target.send(path, bad.SerializeToString(), [bearer(target, "admin")], timeout_s=LIMIT_S)
    assert isinstance(outcome, FulmenError)
    assert outcome.reason == "ARGUMENT_INVALID"
    assert len(outcome.violations) > 10
    assert "more problems" in outcome.violations[-1].description
