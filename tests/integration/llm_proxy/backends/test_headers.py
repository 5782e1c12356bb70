"""What reaches a backend, and what comes back, over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from fulmen.llm_proxy.v1 import backend_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target

MAY_REACH_A_BACKEND = {
    "host", "accept", "accept-encoding", "content-type", "content-length",
    "authorization", "traceparent", "tracestate", "openai-beta", "idempotency-key", "x-client-request-id",
}  # fmt: skip
MAY_REACH_A_CALLER = {
    "content-type", "content-length", "date", "cache-control", "transfer-encoding", "x-fulmen-error-source",
    "x-request-id", "retry-after", "x-ratelimit-remaining-tokens",
}  # fmt: skip
SENT = {
    "Cookie": "session=secret",
    "X-Forwarded-For": "10.0.0.1",
    "X-Forwarded-Host": "inside",
    "Forwarded": "for=10.0.0.1",
    "Proxy-Authorization": "Basic c2VjcmV0",
    "X-Api-Key": "of-the-caller",
    "OpenAI-Organization": "org-of-the-caller",
    "User-Agent": "an agent",
    "X-Anything": "else",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
    "OpenAI-Beta": "assistants=v2",
    "anthropic-beta": "for-anthropic-only",
    "Idempotency-Key": "one",
}


@pytest.fixture
async def talkative() -> AsyncIterator[str]:
    """Yields a backend that tells more than it should."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {
            "Set-Cookie": "backend=secret",
            "Server": "inside/1.0",
            "X-Powered-By": "inside",
            "Via": "inside",
            "OpenAI-Organization": "org-of-the-proxy",
            "X-Request-Id": "r-1",
            "X-RateLimit-Remaining-Tokens": "17",
            "Retry-After": "3",
        }
        if body.get("stream"):
            response = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: [DONE]\n\n")
            return response
        status = body.get("max_tokens", 200)
        return web.json_response({"choices": []}, status=status, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_a_backend_gets_the_proxys_key_and_little_of_what_the_caller_sent(
    store: FakeStore, backend: Backend
) -> None:
    async with running_proxy(store.target, backend_keys={"vendor": "of-the-proxy"}) as proxy:
        await proxy.register("keyed", backend.url, key_name="vendor")
        await proxy.put_route(target("keyed"))
        _, key = proxy.attempt()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        headers = SENT | {"Authorization": f"Bearer {key}"}
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
    got = {name.lower(): value for name, value in backend.received[0].headers.items()}
    assert set(got) <= MAY_REACH_A_BACKEND
    assert got["authorization"] == "Bearer of-the-proxy"
    assert got["host"].startswith("127.0.0.1")
    for name in ("tracestate", "OpenAI-Beta", "Idempotency-Key"):
        assert got[name.lower()] == SENT[name]
    # The trace is the caller's; the place in it is that of the proxy's span.
    assert got["traceparent"].split("-")[1] == SENT["traceparent"].split("-")[1]


async def test_a_server_of_anthropics_dialect_gets_its_own_headers(store: FakeStore) -> None:
    got: dict[str, str] = {}

    async def note(request: web.Request) -> web.Response:
        got.update({name.lower(): value for name, value in request.headers.items()})
        message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": {}}
        return web.json_response(message)

    app = web.Application()
    app.router.add_post("/v1/messages", note)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    async with running_proxy(store.target, backend_keys={"vendor": "of-the-proxy"}) as proxy:
        await proxy.register("keyed", url, key_name="vendor", dialect=backend_pb2.DIALECT_ANTHROPIC)
        await proxy.put_route(target("keyed"))
        _, key = proxy.attempt()
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        headers = SENT | {"X-Api-Key": key, "anthropic-version": "2023-06-01"}
        async with proxy.http.post(f"{proxy.url}/messages", json=body, headers=headers) as answer:
            assert answer.status == 200
    await runner.cleanup()
    assert set(got) <= (MAY_REACH_A_BACKEND | {"x-api-key", "anthropic-beta", "anthropic-version"}) - {"openai-beta"}
    assert got["x-api-key"] == "of-the-proxy"
    assert (got["anthropic-beta"], got["anthropic-version"]) == (SENT["anthropic-beta"], "2023-06-01")


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"max_tokens": 400}, {"max_tokens": 429}])
async def test_a_caller_gets_limits_and_request_ids_and_nothing_of_the_backends_insides(
    store: FakeStore, talkative: str, asked: dict[str, object]
) -> None:
    async with running_proxy(store.target, retry_deadline_s=0) as proxy:
        await proxy.register("talkative", talkative)
        await proxy.put_route(target("talkative"), model="talkative")
        _, key = proxy.attempt()
        body = {"model": "talkative", "messages": [{"role": "user", "content": "x"}], **asked}
        headers = {"Authorization": f"Bearer {key}"}
        async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
    got = {name.lower(): value for name, value in answer.headers.items()}
    assert answer.status == asked.get("max_tokens", 200)
    assert set(got) <= MAY_REACH_A_CALLER
    assert (got["x-request-id"], got["x-ratelimit-remaining-tokens"], got["retry-after"]) == ("r-1", "17", "3")
    assert "secret" not in str(got)


@pytest.mark.parametrize("model", ["tiny\r\nset-cookie: x=1", "tiny\nx: y", "\u2028tiny", "tiny\x00"])
async def test_a_models_name_begins_no_header(proxy: RunningProxy, model: str) -> None:
    _, key = proxy.attempt()
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 404
        assert "set-cookie" not in answer.headers
        assert (await answer.json())["error"]["code"] == "route_not_found"


@pytest.mark.parametrize(
    "line", [b"traceparent: a\r\n b: c", b"traceparent: a\rb: c", b"tracestate: a\nx-evil: c", b"openai-beta: \x00a"]
)
async def test_a_header_that_hides_another_is_refused_or_kept_back(
    proxy: RunningProxy, backend: Backend, line: bytes
) -> None:
    _, key = proxy.attempt()
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.parts.ports["http_port"])
    writer.write(head.encode() + line + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 "))
    for received in backend.received:
        assert not {"b", "x-evil"} & {name.lower() for name in received.headers}
