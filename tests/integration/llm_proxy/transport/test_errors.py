"""What is refused, and how it is said."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.rogue_backend import CHAT, STREAM_END, Peer, chunk
from tests.support.llm_proxy.rogue_world import NATIVE, request_of, rogue_world


async def test_the_attempt_key_never_reaches_the_backend(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(
        store.target, backend_keys={"vendor": {"key": "secret-1", "hosts": ["127.0.0.1"]}}
    ) as proxy:
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
    backend.switches.retry_after = "3600"  # longer than any call waits: they stand
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


async def test_health_and_metrics_answer_without_a_key_and_metrics_at_the_operators_port_alone(
    proxy: RunningProxy,
) -> None:
    root, operator = proxy.url.removesuffix("/v1"), f"http://127.0.0.1:{proxy.parts.ports['metrics_port']}"
    _, key = proxy.attempt()
    await proxy.chat(key)
    for url in (root, operator):
        async with proxy.http.get(f"{url}/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok")
    async with proxy.http.get(f"{operator}/metrics") as answer:
        assert (
            'fulmen_llm_proxy_calls_total{api="chat_completions",backend="one",model="tiny",status="200"} 1.0'
            in await answer.text()
        )
    async with proxy.http.get(f"{root}/metrics") as answer:
        assert answer.status == 404
    async with proxy.http.post(f"{operator}/v1/chat/completions", json={}) as answer:
        assert answer.status == 404


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
