"""Streams are passed through, not faked; a caller that leaves ends its call everywhere."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import aiohttp
import pytest
import yarl

from fulmen.model_call import CLIENT_GONE_ATTRIBUTE
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
DEADLINE_S = 20


def post(proxy: RunningProxy, key: str, body: dict) -> aiohttp.client._RequestContextManager:
    return proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


async def test_the_first_event_arrives_before_the_backend_sends_its_last(proxy: RunningProxy, backend: Backend) -> None:
    _, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), post(proxy, key, BODY) as answer:
        first = await answer.content.readuntil(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
        backend.switches.gate.set()
        rest = await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_caller_that_leaves_a_stream_aborts_the_backend_and_the_call_is_unusable(
    proxy: RunningProxy, backend: Backend, store: FakeStore
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        async with post(proxy, key, BODY) as answer:
            await answer.content.readuntil(b"\n\n")
            answer.close()
        await backend.aborted.acquire()
    summary = await proxy.flush(attempt)
    [(span, record)] = store.spans(attempt)
    assert record is not None
    assert "incomplete" in record.unusable_reason
    assert {a.key: a.value.string_value for a in span.attributes}["error.type"] == "caller_gone"
    assert {a.key: a.value.bool_value for a in span.attributes}[CLIENT_GONE_ATTRIBUTE]
    assert (summary.unusable_count, summary.infra_failure_count) == (1, 0)


async def test_a_caller_that_leaves_before_a_whole_answer_aborts_the_backend(
    proxy: RunningProxy, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        call = asyncio.create_task(proxy.chat(key))
        await backend.arrived.acquire()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await backend.aborted.acquire()
    summary = await proxy.flush(attempt)
    assert (summary.flushed, summary.call_count, summary.infra_failure_count) == (True, 1, 0)


async def whole_call(proxy: RunningProxy, key: str, backend: Backend) -> asyncio.StreamWriter:
    """Makes a call whose answer the backend holds back; returns its connection."""
    url = yarl.URL(proxy.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    body = json.dumps(BODY | {"stream": False}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await backend.arrived.acquire()
    return writer


@pytest.mark.parametrize(("is_reset", "failures"), [(True, 1), (False, 0)], ids=["reset", "closed"])
async def test_a_connection_that_breaks_before_an_answer_is_no_fault_of_the_agent_and_one_that_it_closes_is(
    is_reset: bool, failures: int, proxy: RunningProxy, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        writer = await whole_call(proxy, key, backend)
        if is_reset:
            # The kernel sends a reset instead of the end of the stream.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await backend.aborted.acquire()
        summary = await proxy.flush(attempt)
    assert (summary.flushed, summary.call_count, summary.infra_failure_count) == (True, 1, failures)


async def test_a_stream_that_breaks_tells_nothing_of_whose_fault_it_is(proxy: RunningProxy, backend: Backend) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        async with post(proxy, key, BODY) as answer:
            await answer.content.readuntil(b"\n\n")
            assert answer.connection is not None
            assert answer.connection.transport is not None
            connection = answer.connection.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            answer.close()
        await backend.aborted.acquire()
    assert (await proxy.flush(attempt)).infra_failure_count == 0


async def test_a_call_without_a_rollout_is_passed_through_and_not_recorded(
    proxy: RunningProxy, backend: Backend, store: FakeStore
) -> None:
    from fulmen_service_kit.security.tokens import Role

    key = proxy.signer.issue(Role.CLIENT, subject="person", ttl_s=60)
    async with post(proxy, key, BODY) as answer:
        received = await answer.content.read()
    status, _ = await proxy.chat(key)
    assert status == 200
    assert received.endswith(b"data: [DONE]\n\n")
    assert "return_token_ids" not in backend.received[-1].body
    assert not store.chunks
