"""A policy version that is promoted while calls run: every record says what it knows."""

from __future__ import annotations

import asyncio
import json

from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, POLICY, RunningProxy, target

DEADLINE_S = 30


async def promote(proxy: RunningProxy, version: int) -> None:
    request = route_service_pb2.PromoteVersionRequest(policy=POLICY, policy_version=version)
    await proxy.routes.PromoteVersion(request)


async def test_a_stream_records_which_tokens_came_before_and_after_a_promotion(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate, backend.switches.gate_at = asyncio.Event(), 1 + 5  # after the role and five tokens
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with asyncio.timeout(DEADLINE_S):
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
            text = ""
            while len(text) < 5:
                line = await answer.content.readline()
                if line.startswith(b"data: "):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            await promote(proxy, 2)
            backend.switches.gate.set()
            await answer.content.read()
        await proxy.flush(attempt)

    record = store.record(attempt)
    assert record.usable
    assert [(r.version, r.start, r.end) for r in record.policy_versions] == [(1, 0, 5), (2, 5, len("You said: hi"))]


async def test_a_whole_answer_that_spans_a_promotion_names_both_versions_and_is_not_trained_on(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        call = asyncio.create_task(proxy.chat(key, "hello"))
        await backend.arrived.acquire()
        await promote(proxy, 2)
        backend.switches.gate.set()
        status, _ = await call
        summary = await proxy.flush(attempt)

    assert status == 200
    record = store.record(attempt)
    assert [r.version for r in record.policy_versions] == [1, 2]
    assert (record.usable, record.unusable_reason) == (False, "policy_version_changed")
    assert summary.unusable_count == 1


async def test_a_hedged_call_that_the_first_replica_answers_records_the_promotion(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    async with Backend() as other:
        for server in (backend, other):
            server.switches.gate = asyncio.Event()
        await proxy.register("two", other.url)
        route = route_pb2.Route(name=f"routes/{MODEL}", targets=[target("one"), target("two")])
        route.hedge_delay.FromMilliseconds(100)
        await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
        async with asyncio.timeout(DEADLINE_S):
            call = asyncio.create_task(proxy.chat(key, "hello"))
            servers = [backend, other]
            arrivals = [asyncio.create_task(server.arrived.acquire()) for server in servers]
            await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
            [first] = [server for server, arrival in zip(servers, arrivals, strict=True) if arrival.done()]
            await asyncio.wait(arrivals)
            await promote(proxy, 2)
            assert first.switches.gate is not None
            first.switches.gate.set()
            status, _ = await call
            await proxy.flush(attempt)

    assert status == 200
    record = store.record(attempt)
    assert [r.version for r in record.policy_versions] == [1, 2]
    assert record.unusable_reason == "policy_version_changed"
