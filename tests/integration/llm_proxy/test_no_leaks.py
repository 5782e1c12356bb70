"""No prompt, key, tool argument or answer in any log or error of the proxy, whatever goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fulmen.errors import InternalError
from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc, route_pb2
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import lease_service_pb2
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.calls.pipeline import CallPipeline
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy

DEADLINE_S = 120
PROMPT, ANSWER, ARGUMENT = "canary-of-the-prompt", "canary-of-the-answer", "canary-of-the-argument"
BACKEND_KEY, CALLER_KEY = "canary-of-the-backends-key", "canary-of-a-callers-key"
CANARIES = (PROMPT, ANSWER, ARGUMENT, BACKEND_KEY, CALLER_KEY)

MESSAGE = {"role": "user", "content": PROMPT}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": ARGUMENT}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [MESSAGE], "tools": [TOOL]},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [MESSAGE]},
    "/v1/embeddings": {"input": PROMPT},
}
REFUSALS = {"e400": 400, "e429": 429, "e500": 500, "e503": 503}
KEY_REFUSALS = {"e401": 401, "e403": 403}
MODES = (
    "ok", "tool", *REFUSALS, *KEY_REFUSALS, "text", "half", "drop", "cut", "broken", "big", "lie", "silent", "latin",
)  # fmt: skip


def target_of(mode: str) -> route_pb2.RouteTarget:
    return route_pb2.RouteTarget(backend=f"backends/{mode}", weight=1, policy="p", policy_version=1)


def chunk(content: str = ANSWER) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": content}, "finish_reason": None}
    document = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def answer(mode: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ANSWER}
    if mode == "tool":
        call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": ARGUMENT})}}
        message |= {"tool_calls": [call]}
    choice = {"index": 0, "message": message, "text": ANSWER, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


async def serve(request: web.Request) -> web.StreamResponse:
    """Answers as the model's name says: well, or in one of the ways in which servers fail."""
    body = await request.json()
    mode = body["model"]
    transport = request.transport
    assert transport is not None
    if mode in REFUSALS:
        return web.json_response({"error": {"message": "no"}}, status=REFUSALS[mode])
    if mode in KEY_REFUSALS:
        message = f"Incorrect API key provided: {request.headers.get('Authorization')}"
        return web.json_response({"error": {"message": message}}, status=KEY_REFUSALS[mode])
    if mode == "drop":
        transport.abort()
        return web.Response()
    if mode == "silent":
        await asyncio.sleep(DEADLINE_S)
    if mode == "lie":
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n"
        transport.write(head + ANSWER.encode())
        transport.close()
        return web.Response()
    if body.get("stream"):
        return await _stream(request, mode, transport)
    whole = json.dumps(answer(mode)).encode()
    bodies = {
        "text": ANSWER.encode(),
        "half": whole[:-9],
        "big": whole + b" " * 200_000,
        "latin": whole.replace(ANSWER.encode(), b"\xff" + ANSWER.encode()),
        "cut": b"[]",
        "broken": json.dumps({"choices": ANSWER, "usage": [ANSWER]}).encode(),
    }
    return web.Response(body=bodies.get(mode, whole), content_type="application/json")


async def _stream(request: web.Request, mode: str, transport: asyncio.BaseTransport) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(chunk())
    bodies = {
        "text": ANSWER.encode() + b"\n\n",
        "half": chunk()[:-9] + b"\n\n",
        "latin": chunk("\xff" + ANSWER).replace(b"\\u00ff", b"\xff"),
        "big": b"data: " + ANSWER.encode() * 20_000,
        "broken": b'data: {"choices": "' + ANSWER.encode() + b'"}\n\n',
    }
    await response.write(bodies.get(mode, chunk()))
    if mode == "cut":
        transport.abort()  # type: ignore[attr-defined]  # a transport of a socket has it
        return response
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """Yields the base URL of that backend."""
    app = web.Application()
    app.router.add_post("/v1/{api:.*}", serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


@pytest.fixture
async def proxy(store: FakeStore, server: str) -> AsyncIterator[RunningProxy]:
    """Yields a proxy with a route to each mode of the backend."""
    settings: dict[str, Any] = {
        "backend_keys": {"vendor": {"key": BACKEND_KEY, "hosts": ["127.0.0.1"]}},
        "first_byte_timeout_s": 0.5,
        "read_timeout_s": 0.5,
        "retry_deadline_s": 0,
    }
    async with running_proxy(store.target, max_answer_bytes=100_000, max_request_bytes=50_000, **settings) as running:
        for mode in MODES:
            # A backend for each: none is left alone because another fails.
            await running.register(mode, server, key_name="vendor")
            await running.put_route(target_of(mode), model=mode)
        yield running


async def told(proxy: RunningProxy, path: str, body: Any, key: str, **headers: str) -> tuple[int, str]:
    """Makes one call; returns its status and everything that came back."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = proxy.url.removesuffix("/v1") + path
    try:
        async with proxy.http.post(url, data=data, headers={"Authorization": f"Bearer {key}", **headers}) as answered:
            return answered.status, str(answered.headers) + (await answered.read()).decode(errors="replace")
    except aiohttp.ClientPayloadError:
        return 200, ""


def malformed(request: dict[str, Any]) -> list[Any]:
    """Makes requests that are wrong, each with the canaries in the wrong place."""
    wrong = [request | {name: value} for name in request for value in (PROMPT, {PROMPT: PROMPT}, [PROMPT], 1)]
    wrong += [request | {name: PROMPT} for name in ("stream", "max_tokens", "n", "logprobs", "stream_options", "tools")]
    wrong += [{}, [PROMPT], PROMPT, {PROMPT: PROMPT}]
    texts = [json.dumps(request)[:-3].encode(), b'"' + PROMPT.encode(), b"\xff" + json.dumps(request).encode()]
    return [
        *(one | {"model": "e400"} if isinstance(one, dict) and "model" not in one else one for one in wrong),
        *texts,
    ]


async def test_no_canary_is_in_any_log_or_error(
    proxy: RunningProxy, store: FakeStore, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    attempt, key = proxy.attempt()
    errors: list[str] = []
    seen: set[int] = set()

    async def call(path: str, body: Any, key: str, **headers: str) -> None:
        status, text = await told(proxy, path, body, key, **headers)
        seen.add(status)
        if status != 200:
            errors.append(text)

    async with asyncio.timeout(DEADLINE_S):
        await proxy.put_route(target_of("ok"), model="one-more")
        calls = [
            call(path, request | {"model": mode, "stream": stream}, key)
            for (path, request), mode, stream in itertools.product(REQUESTS.items(), MODES, (False, True))
        ]
        await asyncio.gather(*calls)
        for path, request in REQUESTS.items():
            await asyncio.gather(*(call(path, body, key) for body in malformed(request)))
            await call(path, request | {"model": "ok", "padding": PROMPT * 5000}, key)
            await call(path, request | {"model": "ok"}, CALLER_KEY)
            await call(path, request | {"model": "ok"}, f"{key}{CALLER_KEY}", **{"x-api-key": CALLER_KEY})
            await call(path, request | {"model": "nobodys"}, key)
        summary = await proxy.flush(attempt)
        store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
        while (over := await told(proxy, "/v1/chat/completions", {"model": "ok", "messages": [MESSAGE]}, key))[
            0
        ] == 200:
            pass
        errors.append(over[1])
    assert {200, 400, 401, 404, 413, 429, 500, 502, 503} <= seen | {over[0]}
    assert summary.flushed
    printed = capfd.readouterr()
    logged = printed.out + printed.err + caplog.text
    assert "routing_table_changed" in logged
    for canary in CANARIES:
        assert canary not in logged
        assert not [text for text in errors if canary in text]
    assert key not in logged
    assert not [text for text in errors if key in text]


def test_every_api_is_tried() -> None:
    assert REQUESTS.keys() == BY_PATH.keys()


@pytest.mark.parametrize("grpc", [False, True])
async def test_an_error_that_nobody_foresaw_is_logged_without_its_text(
    proxy: RunningProxy, grpc: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise KeyError(PROMPT) from ValueError(ANSWER)

    _, key = proxy.attempt()
    monkeypatch.setattr(CallPipeline, "run", fails)
    if grpc:
        async with open_channel(f"127.0.0.1:{proxy.parts.server.port}", token=key) as channel:
            completions = completion_service_pb2_grpc.CompletionServiceStub(channel)
            request = completion_service_pb2.CompleteRequest(path="/v1/chat/completions", body_json=PROMPT.encode())
            with pytest.raises(InternalError) as raised:
                await completions.Complete(request)
            text = str(raised.value)
    else:
        status, text = await told(proxy, "/v1/chat/completions", {"model": "ok", "messages": [MESSAGE]}, key)
        assert status == 500
    logged = "".join(capfd.readouterr())
    assert "Internal error. Quote id" in text
    assert "failed_unexpectedly" in logged
    assert "KeyError" in logged
    assert "ValueError" in logged
    assert "in fails" in logged
    for canary in CANARIES:
        assert canary not in logged + text
