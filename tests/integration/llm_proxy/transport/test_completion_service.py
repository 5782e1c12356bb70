"""The calls of the HTTP API over gRPC: same answers, same capture, same ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from fulmen.errors import ArgumentInvalid, MessageTooLarge, TokenInvalid
from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import lease_service_pb2
from fulmen_service_kit.http.server import HttpServer
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy

PATH = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
DEADLINE_S = 30


@pytest.fixture
async def agent(proxy: RunningProxy) -> AsyncIterator[tuple[str, completion_service_pb2_grpc.CompletionServiceStub]]:
    """Yields an attempt and a stub with its key."""
    attempt, key = proxy.attempt()
    channel = open_channel(f"127.0.0.1:{proxy.parts.server.port}", token=key)
    try:
        yield attempt, completion_service_pb2_grpc.CompletionServiceStub(channel)
    finally:
        await channel.close()


Agent = tuple[str, completion_service_pb2_grpc.CompletionServiceStub]


def whole(body: dict, path: str = PATH) -> completion_service_pb2.CompleteRequest:
    return completion_service_pb2.CompleteRequest(path=path, body_json=json.dumps(body).encode())


def stream(body: dict) -> completion_service_pb2.StreamCompleteRequest:
    return completion_service_pb2.StreamCompleteRequest(
        path=PATH, body_json=json.dumps(body | {"stream": True}).encode()
    )


async def test_a_call_is_answered_and_captured_as_over_http(
    proxy: RunningProxy, agent: Agent, store: FakeStore
) -> None:
    attempt, stub = agent
    _, key = proxy.attempt()
    _, over_http = await proxy.chat(key)
    answer = await stub.Complete(whole(BODY), timeout=DEADLINE_S)
    assert answer.http_status == 200
    assert json.loads(answer.body_json)["choices"] == over_http["choices"]
    assert (await proxy.flush(attempt)).unusable_count == 0
    record = store.record(attempt)
    assert record.completion_token_ids


async def test_a_stream_gives_an_event_a_message_and_is_captured(
    proxy: RunningProxy, agent: Agent, store: FakeStore
) -> None:
    attempt, stub = agent
    messages = [message async for message in stub.StreamComplete(stream(BODY), timeout=DEADLINE_S)]
    assert messages[0].http_status == 200
    assert {message.http_status for message in messages[1:]} == {0}
    assert messages[-1].event_json == b"[DONE]"
    deltas = [json.loads(m.event_json)["choices"][0]["delta"] for m in messages[:-1]]
    answer = await stub.Complete(whole(BODY), timeout=DEADLINE_S)
    assert (
        "".join(d.get("content") or "" for d in deltas)
        == json.loads(answer.body_json)["choices"][0]["message"]["content"]
    )
    assert (await proxy.flush(attempt)).unusable_count == 0
    assert len(store.spans(attempt)) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cancelled_call_is_cancelled_at_the_backend_and_is_no_fault_of_the_proxy(
    proxy: RunningProxy, agent: Agent, backend: Backend, store: FakeStore, streamed: bool
) -> None:
    attempt, stub = agent
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        if streamed:
            call = stub.StreamComplete(stream(BODY), timeout=DEADLINE_S)
            await call.read()
            call.cancel()
        else:
            waiting = asyncio.ensure_future(stub.Complete(whole(BODY), timeout=DEADLINE_S))
            await backend.arrived.acquire()
            waiting.cancel()
        await backend.aborted.acquire()
    summary = await proxy.flush(attempt)
    [(span, _)] = store.spans(attempt)
    assert {a.key: a.value.string_value for a in span.attributes}["error.type"] == "caller_gone"
    assert summary.infra_failure_count == 0


async def test_what_a_backend_refuses_comes_with_its_status(agent: Agent, backend: Backend) -> None:
    _, stub = agent
    backend.switches.refusals.extend([400, 400])
    answer = await stub.Complete(whole(BODY), timeout=DEADLINE_S)
    assert answer.http_status == 400
    messages = [message async for message in stub.StreamComplete(stream(BODY), timeout=DEADLINE_S)]
    assert [message.http_status for message in messages] == [400]


async def test_what_the_proxy_cannot_begin_is_an_error_of_the_rpc(agent: Agent, proxy: RunningProxy) -> None:
    _, stub = agent
    with pytest.raises(ArgumentInvalid, match="/v1/chat/completions"):
        await stub.Complete(whole(BODY, path="/v1/nothing"), timeout=DEADLINE_S)
    with pytest.raises(ArgumentInvalid, match="StreamComplete"):
        await stub.Complete(whole(BODY | {"stream": True}), timeout=DEADLINE_S)
    with pytest.raises(ArgumentInvalid, match="messages"):
        await stub.Complete(whole({"model": MODEL}), timeout=DEADLINE_S)
    async with open_channel(f"127.0.0.1:{proxy.parts.server.port}", token="wrong") as channel:
        with pytest.raises(TokenInvalid):
            await completion_service_pb2_grpc.CompletionServiceStub(channel).Complete(whole(BODY), timeout=DEADLINE_S)


async def test_too_large_a_body_and_too_many_calls_are_told(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(store.target, backend_url=backend.url, max_request_bytes=2048, max_in_flight=1) as proxy:
        _, key = proxy.attempt()
        async with open_channel(f"127.0.0.1:{proxy.parts.server.port}", token=key) as channel:
            stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
            with pytest.raises(MessageTooLarge):
                await stub.Complete(whole(BODY | {"user": "x" * 4000}), timeout=DEADLINE_S)
            backend.switches.gate = asyncio.Event()
            running = asyncio.ensure_future(stub.Complete(whole(BODY), timeout=DEADLINE_S))
            await backend.arrived.acquire()
            refused = await stub.Complete(whole(BODY), timeout=DEADLINE_S)
            assert refused.http_status == 429
            assert refused.retry_after_seconds >= 1
            backend.switches.gate.set()
            assert (await running).http_status == 200


async def test_a_call_in_flight_ends_with_its_attempt(
    proxy: RunningProxy, agent: Agent, backend: Backend, store: FakeStore
) -> None:
    attempt, stub = agent
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        call = asyncio.ensure_future(stub.Complete(whole(BODY), timeout=DEADLINE_S))
        await backend.arrived.acquire()
        store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
        answer = await call
        await backend.aborted.acquire()
    assert answer.http_status == 403
    assert json.loads(answer.body_json)["error"]["code"] == "attempt_over"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_proxy_that_drains_lets_calls_finish_and_has_their_captures_delivered(
    proxy: RunningProxy, agent: Agent, backend: Backend, store: FakeStore, streamed: bool
) -> None:
    attempt, stub = agent
    ended: list[str] = []
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        call = asyncio.ensure_future(events(stub) if streamed else stub.Complete(whole(BODY), timeout=DEADLINE_S))
        call.add_done_callback(lambda _: ended.append("call"))
        await backend.arrived.acquire()
        drain = asyncio.create_task(proxy.parts.drain())
        drain.add_done_callback(lambda _: ended.append("drain"))
        http = proxy.parts.roles["http-server"]
        assert isinstance(http, HttpServer)
        await http.drain()
        backend.switches.gate.set()
        await call
        await drain
    assert ended == ["call", "drain"]
    assert len(store.spans(attempt)) == 1


async def test_calls_that_outlast_the_drain_are_cut_and_recorded(store: FakeStore, backend: Backend) -> None:
    async with (
        running_proxy(store.target, backend_url=backend.url, drain_grace_s=1) as proxy,
        asyncio.timeout(DEADLINE_S),
    ):
        attempt, key = proxy.attempt()
        backend.switches.gate = asyncio.Event()
        async with open_channel(f"127.0.0.1:{proxy.parts.server.port}", token=key) as channel:
            stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
            call = asyncio.ensure_future(stub.Complete(whole(BODY), timeout=DEADLINE_S))
            await backend.arrived.acquire()
            await proxy.parts.drain()
            call.cancel()
    [(span, _)] = store.spans(attempt)
    assert {a.key: a.value.string_value for a in span.attributes}["error.type"] == "proxy_stopped"


async def events(
    stub: completion_service_pb2_grpc.CompletionServiceStub,
) -> list[completion_service_pb2.StreamCompleteResponse]:
    return [message async for message in stub.StreamComplete(stream(BODY), timeout=DEADLINE_S)]
