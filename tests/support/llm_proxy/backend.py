"""A deterministic OpenAI-compatible model server on a real socket.

Its "tokens" are the UTF-8 bytes of the text, so that a test can compute every token id and
log-probability on its own. It answers chat completions, whole and streamed, with token ids and
log-probabilities when asked, says what a script says, by default an echo or a call of the first tool
that it is offered, and has switches for the ways in which real servers fail.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.llm_proxy.backend_completions import TextCompletions

MODEL = "byte-model"
JSON = dict[str, Any]


def prompt_ids_of(messages: list[JSON]) -> list[int]:
    """Returns the token ids of a prompt: the bytes of `<role>content` lines."""
    text = "".join(f"<{m['role']}>{m.get('content') or ''}\n" for m in messages)
    return list(text.encode())


def token_ids_of(text: str) -> list[int]:
    """Returns the token ids of a completion."""
    return list(text.encode())


def logprob_of(token_id: int, position: int) -> float:
    """Returns the log-probability of a token at a position of the completion: in [-1.5, -0.01]."""
    return -0.01 - ((token_id * 31 + position * 17) % 97) / 65.0


def reply_to(messages: list[JSON]) -> str:
    """Returns the completion: an echo of the last message's content."""
    return f"You said: {messages[-1].get('content') or ''}"


def echo_or_call(body: JSON) -> str | list[JSON]:
    """Returns what the model says to a request, or its call of the first tool."""
    messages = body["messages"]
    if not body.get("tools") or messages[-1]["role"] == "tool":
        return reply_to(messages)
    return [call_of(body["tools"][0]["function"]["name"], {"input": messages[-1].get("content")})]


def call_of(name: str, arguments: JSON, number: int = 1) -> JSON:
    """Returns a call of a tool as an answer has it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


Script = Callable[[JSON], str | list[JSON]]


@dataclass(kw_only=True)
class Completion:
    """What the server will say to one request, and which extras it was asked for."""

    request: JSON
    id: str
    text: str
    tool_calls: list[JSON]
    prompt_ids: list[int]
    token_ids: list[int]

    @property
    def finish_reason(self) -> str:
        """`tool_calls` when a tool is called, else `stop`."""
        return "tool_calls" if self.tool_calls else "stop"


@dataclass(kw_only=True)
class Switches:
    """Ways to fail or to wait; tests set them while the server runs.

    Attributes:
        refusals: status codes with which the next requests are refused, in order.
        retry_after: value of the Retry-After header of those refusals.
        drop_next: number of next connections to close without an answer.
        cut_after_events: closes a stream after that many events.
        gate: when set, answers wait for it: whole ones before the head, streams before the last
            content event.
        gate_at: the event of a stream before which it waits instead.
        hide: fields left out of answers, of "token_ids", "logprobs", "prompt_token_ids", "usage",
            "finish_reason".
        extra_usage_tokens: added to the reported completion_tokens, which makes the usage wrong.
        weight_versions: reported policy version ranges; empty reports none.
    """

    refusals: deque[int] = field(default_factory=deque)
    retry_after: str | None = None
    drop_next: int = 0
    cut_after_events: int | None = None
    gate: asyncio.Event | None = None
    gate_at: int | None = None
    hide: frozenset[str] = frozenset()
    extra_usage_tokens: int = 0
    weight_versions: list[JSON] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request as it arrived."""

    body: JSON
    headers: dict[str, str]


class Backend:
    """The server; `async with Backend() as backend` runs one in the current event loop."""

    def __init__(
        self, *, port: int = 0, model: str = MODEL, chunk_tokens: int = 1, script: Script = echo_or_call
    ) -> None:
        self.port = port
        self.model = model
        self.switches = Switches()
        self.received: list[Received] = []
        self.aborted = asyncio.Semaphore(0)
        """Released once for each request whose caller went away before its answer was complete."""
        self.arrived = asyncio.Semaphore(0)
        """Released once for each request that arrives."""
        self._chunk_tokens = chunk_tokens
        self._script = script
        self._completions_begun = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base URL, with the version of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Backend:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens, on the same port as before if it ran already."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Closes the socket and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "tests"}]}
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.received.append(Received(body=body, headers=dict(request.headers)))
        answer = TextCompletions(body, model=self.model, logprob_of=logprob_of)
        if not body.get("stream"):
            return web.json_response(answer.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in answer.events():
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.received.append(Received(body=body, headers=dict(request.headers)))
        self.arrived.release()
        switches = self.switches
        if switches.drop_next > 0:
            switches.drop_next -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if switches.refusals:
            return self._refuse(switches.refusals.popleft())
        try:
            completion = self._complete(body)
            if body.get("stream"):
                return await self._stream(request, completion)
            if switches.gate is not None:
                await switches.gate.wait()
            return web.json_response(self._whole(completion))
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.release()
            raise

    def _refuse(self, status: int) -> web.Response:
        headers = {} if self.switches.retry_after is None else {"Retry-After": self.switches.retry_after}
        error = {"message": f"The backend answers {status}.", "type": "backend_test_error"}
        return web.json_response({"error": error}, status=status, headers=headers)

    def _complete(self, body: JSON) -> Completion:
        said = self._script(body)
        tool_calls = [] if isinstance(said, str) else said
        text = said if isinstance(said, str) else "".join(call["function"]["arguments"] for call in said)
        self._completions_begun += 1
        token_ids = token_ids_of(text)[: body.get("max_completion_tokens") or body.get("max_tokens") or None]
        return Completion(
            request=body,
            id=f"chatcmpl-{self._completions_begun}",
            text=bytes(token_ids).decode(errors="ignore"),
            tool_calls=tool_calls,
            prompt_ids=prompt_ids_of(body["messages"]),
            token_ids=token_ids,
        )

    def _shown(self, completion: Completion, name: str) -> bool:
        asked = {"token_ids": "return_token_ids", "prompt_token_ids": "return_token_ids", "logprobs": "logprobs"}
        wanted = completion.request.get(asked[name]) if name in asked else True
        return bool(wanted) and name not in self.switches.hide

    def _logprobs(self, ids: list[int], start: int) -> JSON:
        return {
            "content": [
                {
                    "token": chr(token_id),
                    "logprob": logprob_of(token_id, start + offset),
                    "bytes": [token_id],
                    "top_logprobs": [],
                }
                for offset, token_id in enumerate(ids)
            ]
        }

    def _usage(self, completion: Completion) -> JSON:
        generated = len(completion.token_ids) + self.switches.extra_usage_tokens
        return {
            "prompt_tokens": len(completion.prompt_ids),
            "completion_tokens": generated,
            "total_tokens": len(completion.prompt_ids) + generated,
        }

    def _whole(self, completion: Completion) -> JSON:
        message: JSON = {"role": "assistant", "content": completion.text}
        if completion.tool_calls:
            message = {"role": "assistant", "content": None, "tool_calls": completion.tool_calls}
        choice: JSON = {"index": 0, "message": message, "logprobs": None, "finish_reason": None}
        if self._shown(completion, "finish_reason"):
            choice["finish_reason"] = completion.finish_reason
        if self._shown(completion, "logprobs"):
            choice["logprobs"] = self._logprobs(completion.token_ids, 0)
        if self._shown(completion, "token_ids"):
            choice["token_ids"] = completion.token_ids
        if self.switches.weight_versions:
            choice["weight_versions"] = self.switches.weight_versions
        answer = self._envelope(completion, "chat.completion", [choice])
        if self._shown(completion, "usage"):
            answer["usage"] = self._usage(completion)
        if self._shown(completion, "prompt_token_ids"):
            answer["prompt_token_ids"] = completion.prompt_ids
        return answer

    def _envelope(self, completion: Completion, kind: str, choices: list[JSON]) -> JSON:
        return {
            "id": completion.id,
            "object": kind,
            "created": 1_700_000_000,
            "model": self.model,
            "choices": choices,
            "backend_extra": {"kept": True},
        }

    def _events(self, completion: Completion) -> Iterator[JSON]:
        first = self._envelope(completion, "chat.completion.chunk", [_chunk({"role": "assistant", "content": ""})])
        if self._shown(completion, "prompt_token_ids"):
            first["prompt_token_ids"] = completion.prompt_ids
        yield first
        ids = completion.token_ids
        for start in range(0, len(ids), self._chunk_tokens):
            part = ids[start : start + self._chunk_tokens]
            choice = _chunk(_delta(completion, bytes(part).decode("latin-1"), start))
            if self._shown(completion, "logprobs"):
                choice["logprobs"] = self._logprobs(part, start)
            if self._shown(completion, "token_ids"):
                choice["token_ids"] = part
            yield self._envelope(completion, "chat.completion.chunk", [choice])
        last = _chunk({})
        if self._shown(completion, "finish_reason"):
            last["finish_reason"] = completion.finish_reason
        if self.switches.weight_versions:
            last["weight_versions"] = self.switches.weight_versions
        yield self._envelope(completion, "chat.completion.chunk", [last])
        if (completion.request.get("stream_options") or {}).get("include_usage"):
            closing = self._envelope(completion, "chat.completion.chunk", [])
            if self._shown(completion, "usage"):
                closing["usage"] = self._usage(completion)
            yield closing

    async def _stream(self, request: web.Request, completion: Completion) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = list(self._events(completion))
        for position, event in enumerate(events):
            if position == self.switches.cut_after_events:
                assert request.transport is not None
                request.transport.abort()
                return response
            waits_at = len(events) - 2 if self.switches.gate_at is None else self.switches.gate_at
            if position == waits_at and self.switches.gate is not None:
                await self.switches.gate.wait()
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _chunk(delta: JSON) -> JSON:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(completion: Completion, text: str, start: int) -> JSON:
    if not completion.tool_calls:
        return {"content": text}
    pieces, begin = [], 0
    for index, call in enumerate(completion.tool_calls):
        end = begin + len(call["function"]["arguments"])
        arguments = text[max(begin - start, 0) : max(end - start, 0)]
        piece: JSON = {"index": index, "function": {"arguments": arguments}}
        if begin >= start:
            piece = {"index": index} | call | {"function": call["function"] | {"arguments": arguments}}
        if arguments:
            pieces.append(piece)
        begin = end
    return {"tool_calls": pieces}
