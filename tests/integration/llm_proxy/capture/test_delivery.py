"""Captures reach the store once each, whatever happens to it, and whoever ends an attempt can wait for them."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.llm_proxy.v1 import capture_service_pb2, capture_service_pb2_grpc
from fulmen.rpc.channel import open_channel
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy
from tests.support.llm_proxy.waits import EARLY_S

DEADLINE_S = 30


async def test_a_flush_waits_for_the_stores_acknowledgement(proxy: RunningProxy, store: FakeStore) -> None:
    attempt, key = proxy.attempt()
    store.acknowledge.clear()
    async with asyncio.timeout(DEADLINE_S):
        await proxy.chat(key)
        waiting = asyncio.create_task(proxy.flush(attempt))
        early = await proxy.flush(attempt, timeout=EARLY_S)
        assert not waiting.done()
        store.acknowledge.set()
        summary = await waiting
    assert (early.flushed, early.call_count) == (False, 1)
    assert summary.flushed
    assert len(store.spans(attempt)) == 1


async def test_a_flush_waits_for_a_call_in_flight(proxy: RunningProxy, backend: Backend) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        call = asyncio.create_task(proxy.chat(key))
        await backend.arrived.acquire()
        early = await proxy.flush(attempt, timeout=EARLY_S)
        backend.switches.gate.set()
        await call
        summary = await proxy.flush(attempt)
    assert (early.flushed, summary.flushed) == (False, True)


async def test_a_flush_of_an_attempt_without_calls_answers_at_once_and_none_tells_the_instance(
    proxy: RunningProxy,
) -> None:
    attempt, _ = proxy.attempt()
    summary = await proxy.flush(attempt)
    assert (summary.attempt, summary.flushed, summary.call_count) == (attempt, True, 0)
    one = await proxy.captures.FlushCaptures(capture_service_pb2.FlushCapturesRequest())
    two = await proxy.captures.FlushCaptures(capture_service_pb2.FlushCapturesRequest())
    assert one.instance_id == two.instance_id != ""
    with pytest.raises(ArgumentInvalid):
        await proxy.flush("projects/default/rollouts/1")


async def test_a_runner_may_flush_and_an_agent_may_not(proxy: RunningProxy) -> None:
    from fulmen.errors import PermissionDenied

    attempt, key = proxy.attempt()
    runner = proxy.signer.issue(Role.RUNNER, subject="r", ttl_s=60)
    request = capture_service_pb2.FlushCapturesRequest(attempts=[attempt])
    async with open_channel(f"127.0.0.1:{proxy.parts.server.port}", token=runner) as channel:
        await capture_service_pb2_grpc.CaptureServiceStub(channel).FlushCaptures(request)
    async with open_channel(f"127.0.0.1:{proxy.parts.server.port}", token=key) as channel:
        with pytest.raises(PermissionDenied):
            await capture_service_pb2_grpc.CaptureServiceStub(channel).FlushCaptures(request)


async def test_spans_that_the_store_did_not_acknowledge_come_again_and_are_stored_once(
    proxy: RunningProxy, store: FakeStore
) -> None:
    attempt, key = proxy.attempt()
    store.acknowledge.clear()
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(5):
            assert (await proxy.chat(key))[0] == 200
        await store.stop()
        store.acknowledge.set()
        await store.start()
        summary = await proxy.flush(attempt)
    assert (summary.flushed, summary.call_count) == (True, 5)
    assert len(store.spans(attempt)) == 5


async def test_a_rejected_chunk_counts_as_unusable_and_does_not_block_the_flush(
    proxy: RunningProxy, store: FakeStore
) -> None:
    attempt, key = proxy.attempt()
    store.reject_with = "the rollout is unknown"
    await proxy.chat(key)
    summary = await proxy.flush(attempt)
    assert (summary.flushed, summary.unusable_count) == (True, 1)
    store.reject_with = ""
    await proxy.chat(key)
    assert (await proxy.flush(attempt)).unusable_count == 1


async def test_while_the_store_is_away_and_the_buffer_is_full_new_calls_wait(
    store: FakeStore, backend: Backend
) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        running_proxy(store.target, backend_url=backend.url, capture_buffer_bytes=1) as proxy,
    ):
        attempt, key = proxy.attempt()
        store.acknowledge.clear()
        first = await proxy.chat(key)
        refused = await proxy.chat(key)
        store.acknowledge.set()
        await proxy.flush(attempt)
        later = await proxy.chat(key)
        summary = await proxy.flush(attempt)
    assert (first[0], refused[0], later[0]) == (200, 503, 200)
    assert (summary.call_count, summary.infra_failure_count) == (3, 1)
    assert refused[1]["error"]["source"] == "proxy"


async def test_before_the_store_has_told_its_routes_a_call_is_told_to_come_back(backend: Backend) -> None:
    async with running_proxy("127.0.0.1:9", drain_grace_s=0) as proxy:
        _, key = proxy.attempt()
        status, answer = await proxy.chat(key)
    assert (status, answer["error"]["source"]) == (503, "proxy")


async def test_a_stream_that_outlives_the_grace_is_cut_and_recorded_as_incomplete(
    store: FakeStore, backend: Backend
) -> None:
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as agent:
        async with running_proxy(store.target, backend_url=backend.url, drain_grace_s=3) as proxy:
            attempt, key = proxy.attempt()
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
            headers = {"Authorization": f"Bearer {key}"}
            answer = await agent.post(f"{proxy.url}/chat/completions", json=body, headers=headers)
            await answer.content.readuntil(b"\n\n")
        with pytest.raises(aiohttp.ClientError):
            await answer.content.read()
        answer.close()
    record = store.record(attempt)
    assert "incomplete" in record.unusable_reason
