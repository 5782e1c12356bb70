"""What reaches a backend, and what comes back, over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import RunningProxy
from tests.support.llm_proxy.rogue_backend import (
    CHAT,
    DONE,
    MESSAGES,
    STREAM_END,
    STREAM_HEAD,
    Act,
    answers,
    chunk,
    response,
)
from tests.support.llm_proxy.rogue_world import BACKEND_KEY, CLAUDE, OPENAI, RogueWorld, request_of, rogue_world

MAY_REACH_A_BACKEND = {
    "host", "accept", "accept-encoding", "content-type", "content-length",
    "authorization", "traceparent", "tracestate", "openai-beta", "idempotency-key", "x-client-request-id",
}  # fmt: skip
MAY_REACH_A_CALLER = {
    "content-type", "content-length", "date", "cache-control", "transfer-encoding", "x-fulmen-error-source",
    "x-request-id", "retry-after", "x-ratelimit-remaining-tokens",
    "x-fulmen-request-id", "x-fulmen-backend", "x-fulmen-tries", "x-fulmen-attempt",
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


TOLD = (
    b"set-cookie: backend=secret", b"server: inside/1.0", b"x-powered-by: inside", b"via: inside",
    b"openai-organization: org-of-the-proxy", b"x-request-id: r-1", b"x-ratelimit-remaining-tokens: 17", b"retry-after: 3",
)  # fmt: skip


@pytest.fixture
async def world() -> AsyncIterator[RogueWorld]:
    """Yields a proxy before backends of both dialects."""
    async with rogue_world(retry_deadline_s=0) as running:
        yield running


async def test_a_backend_gets_the_proxys_key_and_little_of_what_the_caller_sent(world: RogueWorld) -> None:
    answer = await world.post(CHAT, request_of(CHAT, OPENAI), world.key(), **SENT)
    assert answer.status == 200
    got = world.backend.asked[-1].headers
    assert set(got) <= MAY_REACH_A_BACKEND
    assert got["authorization"] == f"Bearer {BACKEND_KEY}"
    assert got["host"].startswith("127.0.0.1")
    for name in ("tracestate", "OpenAI-Beta", "Idempotency-Key"):
        assert got[name.lower()] == SENT[name]
    # The trace is the caller's; the place in it is that of the proxy's span.
    assert got["traceparent"].split("-")[1] == SENT["traceparent"].split("-")[1]


async def test_a_server_of_anthropics_dialect_gets_its_own_headers(world: RogueWorld) -> None:
    key = world.key()
    sent = SENT | {"X-Api-Key": key, "anthropic-version": "2023-06-01"}
    answer = await world.post(MESSAGES, request_of(MESSAGES, CLAUDE), key, **sent)
    assert answer.status == 200
    got = world.backend.asked[-1].headers
    assert set(got) <= (MAY_REACH_A_BACKEND | {"x-api-key", "anthropic-beta", "anthropic-version"}) - {"openai-beta"}
    assert got["x-api-key"] == BACKEND_KEY
    assert (got["anthropic-beta"], got["anthropic-version"]) == (SENT["anthropic-beta"], "2023-06-01")


@pytest.mark.parametrize(
    ("act", "status", "stream"),
    [
        (answers(response(b'{"choices": []}', *TOLD)), 200, False),
        (answers(STREAM_HEAD[:-2], *(line + b"\r\n" for line in TOLD), b"\r\n", chunk(DONE), STREAM_END), 200, True),
        (answers(response(b"{}", *TOLD, status=b"400 X")), 400, False),
        (answers(response(b"{}", *TOLD, status=b"429 X")), 429, True),
    ],
    ids=["whole", "streamed", "refused", "throttled"],
)
async def test_a_caller_gets_limits_and_request_ids_and_nothing_of_the_backends_insides(
    world: RogueWorld, act: Act, status: int, stream: bool
) -> None:
    world.backend.will(act)
    answer = await world.post(CHAT, request_of(CHAT, OPENAI) | {"stream": stream}, world.key())
    got = {name.lower(): value for name, value in answer.headers.items()}
    assert answer.status == status
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
