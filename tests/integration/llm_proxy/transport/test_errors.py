"""What is refused, and how it is said."""

from __future__ import annotations

import asyncio
import contextlib
import io

import openai
import pytest

from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen_service_kit.tokens import Role, TokenSigner
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.rogue_backend import CHAT, STREAM_END, Peer, chunk
from tests.support.llm_proxy.rogue_world import NATIVE, request_of, rogue_world


async def test_a_wrong_or_expired_key_is_refused_and_nothing_is_forwarded(
    proxy: RunningProxy, backend: Backend
) -> None:
    name = AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid7(), number=1)
    foreign = TokenSigner("another-deployments-key-of-32-bytes!").attempt_key(
        name, project=DEFAULT_PROJECT, lease_id="l", epoch=1, mode="train", ttl_s=60
    )
    _, expired = proxy.attempt(ttl_s=-10)
    for key in ("", "nonsense", foreign, expired):
        status, answer = await proxy.chat(key)
        assert status == 401
        assert answer["error"]["code"] == "token_invalid"
        assert answer["error"]["source"] == "proxy"
    runner = proxy.signer.issue(Role.RUNNER, subject="runner", ttl_s=60)
    assert (await proxy.chat(runner))[0] == 403
    assert backend.received == []


async def test_the_key_may_come_as_x_api_key(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers={"x-api-key": key}) as answer:
        assert answer.status == 200


async def test_the_attempt_key_never_reaches_the_backend(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(store.target, backend_keys={"vendor": "secret-1"}) as proxy:
        await proxy.register("keyed", backend.url, key_name="vendor")
        await proxy.register("open", backend.url)
        await proxy.put_route(target("keyed"), model="keyed")
        await proxy.put_route(target("open"), model="open")
        _, key = proxy.attempt()
        await proxy.chat(key, model="keyed")
        await proxy.chat(key, model="open")
    assert backend.received[0].headers["Authorization"] == "Bearer secret-1"
    assert "Authorization" not in backend.received[1].headers
    assert not any(key in str(received.headers) for received in backend.received)


async def test_an_unknown_model_is_answered_with_those_that_are_served(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    async with openai.AsyncOpenAI(base_url=proxy.url, api_key=key) as agent:
        with pytest.raises(openai.NotFoundError) as raised:
            await agent.chat.completions.create(model="gone", messages=[{"role": "user", "content": "x"}])
        models = await agent.models.list()
    assert f"Served models: {MODEL}." in str(raised.value)
    assert raised.value.code == "route_not_found"
    assert [model.id for model in models.data] == [MODEL]


@pytest.mark.parametrize("size_bytes", [5_000, 20_000_000])
async def test_an_oversized_body_is_refused_and_its_sender_sees_why(
    store: FakeStore, backend: Backend, size_bytes: int
) -> None:
    async with running_proxy(store.target, max_request_bytes=4096) as proxy:
        await proxy.register("one", backend.url)
        await proxy.put_route(target("one"))
        _, key = proxy.attempt()
        body, headers = io.BytesIO(b"x" * size_bytes), {"Authorization": f"Bearer {key}"}
        async with proxy.http.post(f"{proxy.url}/chat/completions", data=body, headers=headers) as answer:
            refusal = await answer.json()
    assert answer.status == 413
    assert refusal["error"]["code"] == "message_too_large"
    assert backend.received == []


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"model": 1, "messages": []}', b'{"model": "tiny"}', b"\xff{}"]
)
async def test_a_malformed_request_is_the_callers_fault(proxy: RunningProxy, body: bytes) -> None:
    _, key = proxy.attempt()
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", data=body, headers=headers) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/images/generations", 404),
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
    ],
)
async def test_a_path_that_is_not_served_says_what_is(proxy: RunningProxy, method: str, path: str, status: int) -> None:
    root = proxy.url.removesuffix("/v1")
    async with proxy.http.request(method, root + path) as answer:
        assert answer.status == status
        assert "chat/completions" in (await answer.json())["error"]["message"]


async def test_what_the_backend_refuses_is_passed_on_and_named(proxy: RunningProxy, backend: Backend) -> None:
    attempt, key = proxy.attempt()
    backend.switches.refusals.extend([400, 500, 429, 401])
    backend.switches.retry_after = "3600"  # longer than any call waits: the 429 stands
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    seen = []
    for _ in range(4):
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
            seen.append((answer.status, answer.headers["x-fulmen-error-source"]))
    summary = await proxy.flush(attempt)
    assert seen == [(400, "backend"), (500, "backend"), (429, "backend"), (502, "backend")]
    assert (summary.call_count, summary.infra_failure_count, summary.unusable_count) == (4, 3, 0)
    assert summary.throttled_count == 1


async def test_past_the_limit_of_calls_in_flight_a_call_is_refused_with_retry_after(
    store: FakeStore, backend: Backend
) -> None:
    async with running_proxy(store.target, max_in_flight=1) as proxy:
        await proxy.register("one", backend.url)
        await proxy.put_route(target("one"))
        _, key = proxy.attempt()
        backend.switches.gate = asyncio.Event()
        first = asyncio.create_task(proxy.chat(key))
        await backend.arrived.acquire()
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as refused:
            assert refused.status == 429
            assert refused.headers["Retry-After"] == "1"
        backend.switches.gate.set()
        assert (await first)[0] == 200


async def test_a_body_that_does_not_arrive_is_given_up(store: FakeStore) -> None:
    async with asyncio.timeout(20), running_proxy(store.target, request_timeout_s=0.05) as proxy:
        _, key = proxy.attempt()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.parts.ports["http_port"])
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 9\r\n\r\n"
        )
        writer.write(head.encode() + b"{")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer


async def test_health_and_metrics_answer_without_a_key(proxy: RunningProxy) -> None:
    root = proxy.url.removesuffix("/v1")
    _, key = proxy.attempt()
    await proxy.chat(key)
    async with proxy.http.get(f"{root}/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok")
    async with proxy.http.get(f"{root}/metrics") as answer:
        assert (
            'fulmen_llm_proxy_calls_total{api="chat_completions",backend="one",model="tiny",status="200"} 1.0'
            in await answer.text()
        )


async def test_a_refusal_that_comes_in_pieces_is_passed_on_whole_whatever_type_it_has() -> None:
    first, rest = b'{"error": {"message": "too ', b'long", "code": "context_length_exceeded"}}'

    async def refuse(peer: Peer) -> bool:
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await peer.send(head + chunk(first))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await peer.left()  # a proxy that takes the first piece for all of it leaves
        await peer.send(chunk(rest) + STREAM_END)
        return True

    async with rogue_world() as world:
        world.backend.act = refuse
        answer = await world.post(CHAT, request_of(CHAT, NATIVE[CHAT]) | {"stream": True}, world.key())
    assert (answer.status, answer.body) == (400, first + rest)
