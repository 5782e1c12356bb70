"""Backends fail in every way there is; calls are answered all the same, or told what failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2, route_service_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target
from tests.support.llm_proxy.pair import DEADLINE_S, a_pair, put, stream
from tests.support.llm_proxy.scripted_backend import ScriptedBackend


async def a_key_of(proxy: RunningProxy, at: ScriptedBackend, **fields: Any) -> str:
    """Returns a key of an attempt whose calls go to a backend."""
    at.manner = "answer"
    while True:
        _, key = proxy.attempt(**fields)
        before = at.calls
        assert (await proxy.chat(key))[0] == 200
        if at.calls > before:
            return key


async def test_a_backend_that_cannot_be_reached_costs_no_call_and_is_soon_left_alone(store: FakeStore) -> None:
    async with a_pair(store, "answer", recheck_s=300) as (proxy, _, well):
        await proxy.register("gone", "http://127.0.0.1:9/v1")
        await put(proxy, target("gone"), target("well"))
        # Attempts begin where the fewest are, so every other one at the dead one until it is left alone.
        for _ in range(64):
            assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
        assert len(well.received) == 64
        seen = await proxy.health("gone")
    assert (seen.breaker, seen.last_failure_kind, seen.failure_count) == (backend_pb2.BREAKER_STATE_OPEN, "connect", 3)
    assert proxy.metric("retries_total", cause="connect") == 3
    assert proxy.metric("backend_breaker", backend="gone", state="open") == 1


async def test_an_answer_that_breaks_off_before_its_end_is_asked_for_again_elsewhere(store: FakeStore) -> None:
    async with a_pair(store, "answer") as (proxy, odd, well):
        key = await a_key_of(proxy, odd)
        odd.manner, before = "half", len(well.received)
        assert (await proxy.chat(key))[0] == 200
        assert len(well.received) == before + 1
        assert (await proxy.health("odd")).last_failure_kind == "broken"


async def test_a_stream_that_dies_is_told_within_it_never_asked_for_again_and_counts(store: FakeStore) -> None:
    async with a_pair(store, "answer") as (proxy, odd, well):
        key = await a_key_of(proxy, odd)
        odd.manner, before = "die", len(well.received)
        status, body = await stream(proxy, key)
        seen = await proxy.health("odd")
    assert status == 200
    assert body.count(b'"content": "H"') == 1
    assert b'"code":"backend_unavailable"' in body
    assert (seen.last_failure_kind, seen.failure_count) == ("stream_broken", 1)
    assert len(well.received) == before


async def test_a_stream_that_stalls_ends_with_an_error_and_counts(store: FakeStore) -> None:
    async with a_pair(store, "answer", read_timeout_s=0.2) as (proxy, odd, _):
        key = await a_key_of(proxy, odd)
        odd.manner = "stall"
        _, body = await stream(proxy, key)
        await odd.abandoned.acquire()
        seen = await proxy.health("odd")
    assert b'"code":"backend_unavailable"' in body
    assert seen.last_failure_kind == "stream_stalled"


async def test_a_long_answer_is_no_failure_and_goes_to_another_replica_when_its_time_is_over(store: FakeStore) -> None:
    async with a_pair(store, "answer", first_byte_timeout_s=0.2) as (proxy, odd, _):
        key = await a_key_of(proxy, odd)
        odd.manner = "hang"
        assert (await proxy.chat(key))[0] == 200
        seen = await proxy.health("odd")
    assert (seen.failure_count, seen.breaker) == (0, backend_pb2.BREAKER_STATE_CLOSED)


@pytest.mark.parametrize("by_route", [True, False])
async def test_past_its_deadline_a_call_is_answered_504_and_its_backend_is_left(
    store: FakeStore, by_route: bool
) -> None:
    settings = {} if by_route else {"answer_deadline_s": 0.3}
    async with a_pair(store, "hang", **settings) as (proxy, odd, _):
        fields = {"deadline": Duration(nanos=300_000_000)} if by_route else {}
        await put(proxy, target("odd"), **fields)
        attempt, key = proxy.attempt()
        status, answer = await proxy.chat(key)
        await odd.abandoned.acquire()
        summary = await proxy.flush(attempt)
        assert (await proxy.health("odd")).in_flight_count == 0
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert (odd.calls, summary.infra_failure_count) == (1, 1)


async def test_a_caller_that_leaves_says_nothing_about_the_backend(store: FakeStore) -> None:
    async with a_pair(store, "answer") as (proxy, odd, _):
        key = await a_key_of(proxy, odd)
        odd.manner = "hang"
        for _ in range(5):
            while not odd.arrived.locked():
                await odd.arrived.acquire()
            call = asyncio.create_task(proxy.chat(key))
            await odd.arrived.acquire()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        for _ in range(5):
            await odd.abandoned.acquire()
        seen = await proxy.health("odd")
    assert (seen.failure_count, seen.in_flight_count, seen.healthy) == (0, 0, True)


async def test_retry_after_is_waited_for(proxy: RunningProxy, backend: Backend) -> None:
    backend.switches.refusals.append(429)
    backend.switches.retry_after = "1"
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
    assert loop.time() - began >= 1
    assert (await proxy.health("one")).failure_count == 0


async def test_fallbacks_answer_in_order_when_no_target_can(store: FakeStore) -> None:
    async with a_pair(store, "answer", recheck_s=300) as (proxy, _, well):
        await proxy.register("gone", "http://127.0.0.1:9/v1")
        await put(proxy, target("well", policy=""), model="spare")
        await put(proxy, target("gone", policy=""), model="first", fallbacks=["routes/nowhere", "routes/spare"])
        _, key = proxy.attempt()
        for _ in range(5):
            status, _answer = await proxy.chat(key, model="first")
            assert status == 200
        assert [one.body["model"] for one in well.received] == ["byte-model"] * 5
        # Once the breaker is open, the dead backend is not even asked.
        assert (await proxy.health("gone")).request_count == 3
    assert proxy.metric("fallbacks_total", cause="breaker") >= 2


async def test_a_cached_route_falls_back_as_others_do(store: FakeStore) -> None:
    async with a_pair(store, "answer") as (proxy, _, well):
        await put(proxy, target("well", policy=""), model="spare")
        await proxy.register("drained", "http://127.0.0.1:9/v1", draining=True)
        await put(proxy, target("drained", policy=""), model="first", fallbacks=["routes/spare"], cached=True)
        status, _answer = await proxy.chat(proxy.attempt(mode="test")[1], model="first")
    assert (status, len(well.received)) == (200, 1)


async def test_a_fallback_that_is_gone_does_not_hide_why_the_call_failed(store: FakeStore) -> None:
    async with a_pair(store, "answer", retry_deadline_s=0.2) as (proxy, _, _well):
        await proxy.register("gone", "http://127.0.0.1:9/v1")
        await put(proxy, target("gone", policy=""), model="first", fallbacks=["routes/nowhere"])
        status, answer = await proxy.chat(proxy.attempt()[1], model="first")
    assert (status, answer["error"]["code"]) == (502, "backend_unavailable")


async def test_a_training_call_of_a_policy_never_falls_back(store: FakeStore) -> None:
    async with a_pair(store, "answer", retry_deadline_s=0.2) as (proxy, _, well):
        await proxy.register("gone", "http://127.0.0.1:9/v1")
        await put(proxy, target("well", policy=""), model="spare")
        await put(proxy, target("gone"), fallbacks=["routes/spare"])
        statuses = {mode: (await proxy.chat(proxy.attempt(mode=mode)[1]))[0] for mode in ("train", "validation")}
        assert len(well.received) == 1
    assert statuses == {"train": 502, "validation": 200}


async def test_a_hedge_asks_a_second_replica_and_cancels_the_slower(store: FakeStore) -> None:
    async with a_pair(store, "answer") as (proxy, odd, well):
        key = await a_key_of(proxy, odd)
        await put(proxy, target("odd"), target("well"), hedge_delay=Duration(nanos=50_000_000))
        odd.manner, before = "hang", len(well.received)
        assert (await proxy.chat(key))[0] == 200
        await odd.abandoned.acquire()
        status, events = await stream(proxy, key)
        await odd.abandoned.acquire()
        assert (status, events.count(b"[DONE]")) == (200, 1)
        assert len(well.received) == before + 2
        assert ((await proxy.health("odd")).in_flight_count, (await proxy.health("well")).in_flight_count) == (0, 0)
    assert proxy.metric("hedges_total", outcome="won") == 2


async def test_past_the_queue_of_a_backend_calls_are_refused_with_retry_after(
    store: FakeStore, backend: Backend
) -> None:
    settings = {"max_waiting_per_backend": 1, "queue_timeout_s": 0.3}
    async with asyncio.timeout(DEADLINE_S), running_proxy(store.target, **settings) as proxy:
        await proxy.register("one", backend.url, max_in_flight=1)
        await put(proxy, target("one"))
        _, key = proxy.attempt()
        backend.switches.gate = asyncio.Event()
        running = asyncio.create_task(proxy.chat(key))
        await backend.arrived.acquire()
        refused = await asyncio.gather(*[proxy.chat(key) for _ in range(2)])
        backend.switches.gate.set()
        assert (await running)[0] == 200
        assert (await proxy.chat(key))[0] == 200
    assert [(status, answer["error"]["code"]) for status, answer in refused] == [(429, "model_limit_exceeded")] * 2
    assert len(backend.received) == 2
    assert proxy.metric("backend_queue_refusals_total") == 2


async def test_probes_open_and_half_open_the_breaker_and_calls_close_it(store: FakeStore) -> None:
    async with a_pair(store, "answer", health_interval_s=0.05) as (proxy, odd, well):
        await proxy.register("odd", odd.url, engine=backend_pb2.ENGINE_VLLM)
        key = await a_key_of(proxy, odd)
        odd.health = 503
        while (await proxy.health("odd")).breaker != backend_pb2.BREAKER_STATE_OPEN:
            await odd.next_probe()
        before = len(well.received)
        assert (await proxy.chat(key))[0] == 200
        assert len(well.received) == before + 1
        odd.health = 200
        while (await proxy.health("odd")).breaker != backend_pb2.BREAKER_STATE_HALF_OPEN:
            await odd.next_probe()
        before, kept = odd.calls, len(well.received)
        assert (await proxy.chat(key))[0] == 200
        assert (odd.calls, len(well.received)) == (before, kept + 1)  # it stays where it has gone
        for _ in range(4):
            assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
        assert odd.calls >= before + 2
        assert (await proxy.health("odd")).breaker == backend_pb2.BREAKER_STATE_CLOSED


async def test_a_saturated_engine_gets_no_new_attempt_and_its_load_is_told(store: FakeStore) -> None:
    async with a_pair(store, "answer", health_interval_s=0.05) as (proxy, odd, well):
        await proxy.register("odd", odd.url, engine=backend_pb2.ENGINE_VLLM)
        key = await a_key_of(proxy, odd)
        odd.metrics = (
            b"# TYPE vllm:num_requests_waiting gauge\n"
            b'vllm:num_requests_waiting{engine="0"} 20.0\nvllm:num_requests_waiting{engine="1"} 5.0\n'
            b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        )
        while (seen := await proxy.health("odd")).engine_waiting_count != 25:
            await odd.next_probe()
        before = len(well.received)
        for _ in range(3):
            assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
        assert len(well.received) == before + 3
        assert (await proxy.chat(key))[0] == 200
        assert len(well.received) == before + 3
    assert seen.engine_cache_usage == 0.5


async def test_two_proxies_follow_a_change_and_keep_their_own_breakers(store: FakeStore, backend: Backend) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        running_proxy(store.target) as one,
        running_proxy(store.target) as two,
        Backend() as second,
    ):
        await one.register("one", backend.url)
        await one.register("two", second.url)
        await one.put_route(target("one"))
        watch = two.routes.WatchRoutes(route_service_pb2.WatchRoutesRequest())
        while not (await watch.read()).routes:
            pass
        await one.put_route(target("two"))
        await watch.read()
        watch.cancel()
        for proxy in (one, two):
            assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
    assert (len(backend.received), len(second.received)) == (0, 2)


async def test_every_problem_of_a_route_and_of_a_backend_is_told_at_once(proxy: RunningProxy) -> None:
    bad = route_pb2.Route(
        name="routes/Upper Case",
        targets=[
            route_pb2.RouteTarget(backend="nobody", weight=-1, policy="p", policy_version=-1),
            route_pb2.RouteTarget(backend="backends/one"),
        ],
        overrides=[route_pb2.ModeOverride(mode="production", request_fields_json="[]")],
        balancing=99,
        fallbacks=["routes/a", "routes/a", "b"],
        deadline=Duration(seconds=-1),
        hedge_delay=Duration(),
        cached=True,
    )
    with pytest.raises(ArgumentInvalid) as raised:
        await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=bad))
    assert sorted(one.field for one in raised.value.violations) == sorted(
        [
            "route.name",
            "route.targets[0].backend",
            "route.targets[0].weight",
            "route.targets[0].policy_version",
            "route.targets",
            "route.overrides[0].mode",
            "route.overrides[0].request_fields_json",
            "route.balancing",
            "route.fallbacks[1]",
            "route.fallbacks[2]",
            "route.deadline",
            "route.hedge_delay",
            "route.cached",
        ]
    )
    with pytest.raises(ArgumentInvalid) as raised:
        await proxy.register("Bad", "ftp://x", max_in_flight=-1, engine=99, apis=[77], health_path="health")
    assert len(raised.value.violations) == 6
