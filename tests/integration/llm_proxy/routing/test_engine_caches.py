"""An engine serves as many attempts as its cache holds; the others wait in the proxy, and none makes all lose theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from benchmarks.routing.load import Case, run
from fulmen.llm_proxy.v1 import backend_pb2
from tests.support import leaping_clock
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target
from tests.support.llm_proxy.simulated_engine import Timings
from tests.support.llm_proxy.simulated_server import SimulatedServer

DEADLINE_S = 30
QUICK = Timings(prefill_tokens_per_s=1e7, weights_s=1e-4, step_s=1e-4, blocks=200)
"""A cache of 3,200 tokens."""
LONG = "word" * 2000
KEYS = {"gpu": {"key": "of the engine", "hosts": ["127.0.0.1"]}}


@asynccontextmanager
async def small_engine(store: FakeStore, **settings: Any) -> AsyncIterator[tuple[RunningProxy, SimulatedServer]]:
    """Yields a proxy that knows the size of its one engine's cache."""
    async with (
        SimulatedServer(QUICK, key="of the engine").running() as server,
        running_proxy(store.target, health_interval_s=0.05, backend_keys=KEYS, **settings) as proxy,
    ):
        await proxy.register("one", server.url, engine=backend_pb2.ENGINE_VLLM, returns_token_ids=False, key_name="gpu")
        await proxy.put_route(target("one"))
        async with asyncio.timeout(DEADLINE_S):
            while (await proxy.health()).engine_cache_usage < 0:  # read together with its size
                pass
        yield proxy, server


async def call(proxy: RunningProxy, key: str) -> int:
    return (await proxy.chat(key, LONG, max_tokens=8))[0]


async def busy(proxy: RunningProxy, server: SimulatedServer, key: str) -> list[asyncio.Task[int]]:
    """Keeps the engine busy with calls of an attempt, which do not end until it is open."""
    server.engine.open.clear()
    calls = [asyncio.create_task(call(proxy, key)) for _ in range(4)]
    async with asyncio.timeout(DEADLINE_S):
        while (await proxy.health()).in_flight_count < len(calls):
            pass
    return calls


async def until_waiting(proxy: RunningProxy, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await proxy.health()).waiting_count != count:
            pass


async def test_an_attempt_that_does_not_fit_waits_until_one_ends(store: FakeStore) -> None:
    async with small_engine(store) as (proxy, server):
        first, first_key = proxy.attempt()
        running = await busy(proxy, server, first_key)
        waiting = [asyncio.create_task(call(proxy, proxy.attempt()[1])) for _ in range(2)]
        await until_waiting(proxy, 2)
        running.append(asyncio.create_task(call(proxy, first_key)))  # it has precedence
        async with asyncio.timeout(DEADLINE_S):
            while (await proxy.health()).in_flight_count < len(running):
                pass
        assert (await proxy.health()).waiting_count == 2
        assert proxy.metric("backend_attempts", backend="one") == 3

        server.engine.open.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*running, *waiting) == [200] * 7
        await proxy.flush(first)
        assert proxy.metric("backend_attempts", backend="one") == 2


async def test_an_engine_that_is_not_busy_lets_attempts_in_that_do_not_fit(store: FakeStore) -> None:
    async with small_engine(store) as (proxy, server):
        for _ in range(3):
            assert await call(proxy, proxy.attempt()[1]) == 200
        assert server.engine.finished == 3


async def test_a_call_whose_turn_does_not_come_in_time_is_told_so(store: FakeStore) -> None:
    async with small_engine(store, answer_deadline_s=2.0, retry_deadline_s=0) as (proxy, server):
        running = await busy(proxy, server, proxy.attempt()[1])
        assert await call(proxy, proxy.attempt()[1]) == 504
        assert server.engine.finished == 0
        server.engine.open.set()
        await asyncio.gather(*running)


async def test_more_calls_than_may_wait_are_refused(store: FakeStore) -> None:
    async with small_engine(store, max_waiting_per_backend=1, retry_deadline_s=0) as (proxy, server):
        running = await busy(proxy, server, proxy.attempt()[1])
        waiting = asyncio.create_task(call(proxy, proxy.attempt()[1]))
        await until_waiting(proxy, 1)
        assert await call(proxy, proxy.attempt()[1]) == 429
        server.engine.open.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*running, waiting) == [200] * 5


async def test_all_are_let_in_where_the_operator_says_so(store: FakeStore) -> None:
    async with small_engine(store, engine_cache_share=0.0) as (proxy, server):
        running = await busy(proxy, server, proxy.attempt()[1])
        running.append(asyncio.create_task(call(proxy, proxy.attempt()[1])))
        async with asyncio.timeout(DEADLINE_S):
            while (await proxy.health()).in_flight_count < len(running):
                pass
        server.engine.open.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*running) == [200] * 5


async def test_a_call_that_waits_goes_to_an_engine_that_joins(store: FakeStore) -> None:
    async with small_engine(store) as (proxy, server), SimulatedServer(QUICK).running() as other:
        running = await busy(proxy, server, proxy.attempt()[1])
        waiting = asyncio.create_task(call(proxy, proxy.attempt()[1]))
        await until_waiting(proxy, 1)
        await proxy.register("two", other.url, engine=backend_pb2.ENGINE_VLLM, returns_token_ids=False)
        await proxy.put_route(target("one"), target("two"))
        async with asyncio.timeout(DEADLINE_S):
            assert await waiting == 200
        assert other.engine.finished == 1
        server.engine.open.set()
        await asyncio.gather(*running)


def test_twice_as_many_agents_as_fit_do_not_lose_the_caches() -> None:
    slow = Timings(prefill_tokens_per_s=6000, blocks=5000)
    twice = Case(rule="sticky", agents=64, begun=64, timings=slow, warm_s=10.0, measured_s=12.0)
    by_turns = leaping_clock.run(run(replace(twice, by_turns=True)))
    at_once = leaping_clock.run(run(twice))
    assert by_turns["failed_calls"] == at_once["failed_calls"] == 0
    assert by_turns["hit_rate"] > 1.2 * at_once["hit_rate"], (by_turns, at_once)
    assert by_turns["calls"] > 1.2 * at_once["calls"], (by_turns, at_once)
