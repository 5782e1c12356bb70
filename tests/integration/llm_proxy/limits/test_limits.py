"""Limits, budgets and usage of model calls: two proxies on one store hold them together."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2
from fulmen.model_call import COST_ATTRIBUTE
from fulmen.store.v1 import span_service_pb2
from fulmen.store.v1 import usage_service_pb2 as usage_pb
from fulmen.store.v1.model_limits_pb2 import CallLimits
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.limits_world import (
    CALL_MICROS,
    CALL_TOKENS,
    COMPLETION_TOKENS,
    HELLO,
    PROMPT_TOKENS,
    World,
)
from tests.support.llm_proxy.rogue_backend import CHAT, WHOLE, answers, response
from tests.support.llm_proxy.rogue_world import NATIVE, request_of, rogue_world
from tests.support.store.running import LIMIT_S, SIGNING_KEY, running_store


async def test_two_proxies_hold_one_limit_of_requests_together(world: World) -> None:
    await world.limit(project=CallLimits(requests_per_minute=6))
    attempt = await world.attempt()
    outcomes = []
    for _ in range(5):
        for proxy in world.proxies:
            outcomes.append((await proxy.chat(attempt.attempt_key))[0])
            await world.sync()
    assert outcomes == [200] * 6 + [429] * 4
    assert len(world.backend.received) == 6


async def test_a_refusal_tells_the_limit_and_when_to_come_back(world: World) -> None:
    await world.limit(project=CallLimits(requests_per_minute=1))
    attempt, (proxy, _) = await world.attempt(), world.proxies
    await proxy.chat(attempt.attempt_key)
    body = {"model": MODEL, "messages": HELLO}
    headers = {"Authorization": f"Bearer {attempt.attempt_key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 429
        # Of a window of a minute, however long the calls have taken.
        assert 1 <= int(answer.headers["retry-after"]) <= 63
        error = (await answer.json())["error"]
    assert error["code"] == "model_limit_exceeded"
    assert error["type"] == "rate_limit_error"
    assert "requests_per_minute of projects/default exceeded (1)" in error["message"]
    assert proxy.metric("limit_refusals_total", limit="requests_per_minute", of="project") == 1


async def test_calls_at_once_are_counted_across_proxies(world: World) -> None:
    await world.limit(project=CallLimits(concurrent_calls=1))
    attempt, (first, second) = await world.attempt(), world.proxies
    world.backend.switches.gate = asyncio.Event()
    running = asyncio.create_task(first.chat(attempt.attempt_key))
    await asyncio.wait_for(world.backend.arrived.acquire(), LIMIT_S)
    await world.sync()
    assert (await second.chat(attempt.attempt_key))[0] == 429
    world.backend.switches.gate.set()
    assert (await running)[0] == 200
    await world.sync()
    assert (await second.chat(attempt.attempt_key))[0] == 200


async def test_a_spent_token_budget_ends_an_attempts_calls_at_every_proxy(world: World) -> None:
    mine = await world.attempt(model_token_budget=2 * CALL_TOKENS)
    other = await world.attempt()
    first, second = world.proxies
    assert (await first.chat(mine.attempt_key))[0] == 200
    assert (await first.chat(mine.attempt_key))[0] == 200
    assert (await first.chat(mine.attempt_key))[0] == 403
    # The other proxy knows nothing of it until it asks about the attempt: its first call may pass.
    await world.sync()
    await second.chat(mine.attempt_key)
    await world.sync()
    status, document = await second.chat(mine.attempt_key)
    assert (status, document["error"]["code"]) == (403, "token_budget_exceeded")
    assert (await second.chat(other.attempt_key))[0] == 200


async def test_a_backends_limit_is_held_for_all_projects_and_proxies(world: World) -> None:
    first, second = world.proxies
    backend = backend_pb2.Backend(
        name="backends/one", base_url=world.backend.url, returns_token_ids=True, requests_per_minute=2
    )
    await first.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=backend))
    async with asyncio.timeout(LIMIT_S):
        while (await _backend(second)).requests_per_minute != 2:  # noqa: ASYNC110  # state of another replica
            await asyncio.sleep(0.02)
    attempt = await world.attempt()
    outcomes = []
    for _ in range(2):
        for proxy in (first, second):
            status, document = await proxy.chat(attempt.attempt_key)
            outcomes.append(status)
            await world.sync()
    assert outcomes == [200, 200, 429, 429]
    assert "requests_per_minute of backends/one exceeded (2)" in document["error"]["message"]
    with pytest.raises(Exception, match="tokens_per_minute"):
        await first.register("one", world.backend.url, tokens_per_minute=-1)


async def test_a_replica_whose_limit_is_used_up_is_passed_over_for_another(world: World) -> None:
    proxy, _ = world.proxies
    for backend_id in ("one", "two"):
        await proxy.register(backend_id, world.backend.url, requests_per_minute=2)
    await proxy.put_route(target("one"), target("two"))
    attempt = await world.attempt()
    assert [(await proxy.chat(attempt.attempt_key))[0] for _ in range(5)] == [200] * 4 + [429]
    await world.sync()
    used = await world.usage(group_by=usage_pb.USAGE_GROUPING_BACKEND)
    assert {name: each.request_count for name, each in used.items() if name} == {"backends/one": 2, "backends/two": 2}


async def test_usage_and_cost_arrive_once_by_attempt_and_in_the_span(world: World) -> None:
    attempt = await world.attempt()
    for proxy in world.proxies:
        await proxy.chat(attempt.attempt_key)
        await _streamed(proxy, attempt.attempt_key)
    world.backend.switches.refusals.append(400)
    await world.proxies[0].chat(attempt.attempt_key)
    await world.sync()
    await world.sync()
    rollout = attempt.rollout.name
    counted = usage_pb.Usage(
        request_count=5,
        failure_count=1,
        prompt_token_count=4 * PROMPT_TOKENS,
        completion_token_count=4 * COMPLETION_TOKENS,
        cost_micros=4 * CALL_MICROS,
    )
    assert await world.usage(rollout=rollout, group_by=usage_pb.USAGE_GROUPING_ATTEMPT) == {attempt.attempt: counted}
    assert await world.usage(training_run="projects/default/trainingRuns/r") == {"": counted}
    assert await world.usage(group_by=usage_pb.USAGE_GROUPING_BACKEND) == {"backends/one": counted}
    assert await world.usage(group_by=usage_pb.USAGE_GROUPING_MODEL) == {MODEL: counted}
    first = world.proxies[0]
    assert first.metric("tokens_total", backend="one", kind="prompt", model=MODEL) == 2 * PROMPT_TOKENS
    assert first.metric("cost_dollars_total") == 2 * CALL_MICROS / 1e6
    for proxy in world.proxies:
        await proxy.flush(attempt.attempt)
    listed = await world.stubs.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=attempt.attempt))
    costs = [
        attribute.value.double_value
        for one in listed.spans
        for attribute in Span.FromString(one.span.otlp_span).attributes
        if attribute.key == COST_ATTRIBUTE
    ]
    assert costs == [pytest.approx(CALL_MICROS / 1e6)] * 4


async def test_a_caller_that_hangs_up_early_does_not_save_its_tokens(world: World) -> None:
    attempt = await world.attempt()
    proxy, _ = world.proxies
    world.backend.switches.gate = asyncio.Event()
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    headers = {"Authorization": f"Bearer {attempt.attempt_key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        await answer.content.readany()
        answer.close()
    await asyncio.wait_for(world.backend.aborted.acquire(), LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        while not (counted := await world.usage(rollout=attempt.rollout.name)):
            await world.sync()
    assert counted[""].prompt_token_count > 0
    assert counted[""].completion_token_count > 0
    assert counted[""].failure_count == 1


async def test_usage_waits_for_a_store_that_is_away(database_url: str) -> None:
    async with Backend() as backend, AsyncExitStack() as stores:
        store = await stores.enter_async_context(running_store(database_url))
        port = store.port
        async with running_proxy(store.target, signing_key=SIGNING_KEY) as proxy:
            await proxy.register("one", backend.url)
            await proxy.put_route(target("one", policy="", version=0))
            key = store.token()
            assert (await proxy.chat(key))[0] == 200
            await stores.aclose()
            for _ in range(3):
                assert (await proxy.chat(key))[0] == 200
            async with running_store(database_url, port=port) as again:
                stubs = await again.stubs()
                async with asyncio.timeout(LIMIT_S):
                    while True:
                        groups = (await stubs.usage.GetUsage(usage_pb.GetUsageRequest())).groups
                        if groups and groups[0].usage.request_count >= 4:
                            break
                        await asyncio.sleep(0.05)
                assert groups[0].usage.request_count == 4


async def _streamed(proxy: RunningProxy, key: str) -> bytes:
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        return await answer.read()


async def _backend(proxy: RunningProxy) -> backend_pb2.Backend:
    answer = await proxy.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
    found: backend_pb2.Backend = answer.backends[0]
    return found


@pytest.mark.parametrize("tokens", [10**18, 10**30, -(10**30)])
async def test_numbers_beyond_all_counts_stop_no_proxy(tokens: int) -> None:
    async with rogue_world() as world:
        lie = {"prompt_tokens": tokens, "completion_tokens": 2, "total_tokens": 4}
        world.backend.act = answers(response(json.dumps(WHOLE[CHAT] | {"usage": lie}).encode()), goes_on=True)
        _, key = world.proxy.attempt(token_budget=1000)
        body = request_of(CHAT, NATIVE[CHAT]) | {"max_tokens": tokens}
        assert (await world.post(CHAT, body, key)).status == 200
        await world.proxy.parts.drain()
        counted = world.proxy.metric("tokens_total", model=NATIVE[CHAT], backend="openai", kind="prompt")
    assert counted is not None
    assert 0 < counted < 1000
