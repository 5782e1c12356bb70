"""A stand-in for Anthropic's service on a real socket.

Whatever it answers is built from the typed models of the vendor's own package, so that the shapes are the vendor's; the
blocks of requests are checked against that package's types. It is deterministic: it echoes the last text, thinks when
asked to, calls the tools that it is offered, and has switches for the ways in which the service refuses and fails.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from anthropic.types import (
    ContentBlock,
    InputJSONDelta,
    Message,
    MessageTokensCount,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming as BetaMessageCreateParamsStreaming
from anthropic.types.content_block_param import ContentBlockParam
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from anthropic.types.message_delta_usage import MessageDeltaUsage
from anthropic.types.raw_message_delta_event import Delta
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter, ValidationError

MODEL = "claude-test"
VERSIONS = ("2023-06-01", "2026-10-21")
KEY = "vendor-key"
THOUGHT, SIGNATURE = "Let me think.", "c2lnbmVk"
JSON = dict[str, Any]

_BLOCK = TypeAdapter(ContentBlockParam)
CREATE_FIELDS = frozenset(
    name
    for params in (MessageCreateParamsStreaming, BetaMessageCreateParamsStreaming)
    for name in params.__annotations__
)
_SAMPLING = frozenset({"temperature", "top_p", "top_k"})
"""Fields that the first version has and the second, whose types the package has, refuses."""
CREATE_FIELDS |= _SAMPLING
_COUNT_FIELDS = frozenset(MessageCountTokensParams.__annotations__)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}


class Invalid(Exception):
    """A request that the service refuses with 400."""


@dataclass(kw_only=True)
class Switches:
    """What the service does next; tests set them while it runs.

    Attributes:
        refusals: status codes with which the next requests are refused, in order.
        retry_after: value of the Retry-After header of those refusals.
        answers: the next answers, instead of an echo.
        error_after_events: ends a stream with an `overloaded_error` event after that many events.
        cut_after_events: closes a stream after that many events.
        piece_bytes: bytes of one delta.
    """

    refusals: deque[int] = field(default_factory=deque)
    retry_after: str | None = None
    answers: deque[Message] = field(default_factory=deque)
    error_after_events: int | None = None
    cut_after_events: int | None = None
    piece_bytes: int = 4


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request as it arrived."""

    path: str
    body: JSON
    headers: dict[str, str]


class AnthropicVendor:
    """The service; `async with AnthropicVendor() as vendor` runs one in the current event loop."""

    def __init__(self) -> None:
        self.switches = Switches()
        self.received: list[Received] = []
        self.sent: list[bytes] = []
        """The body of every answer, as it was sent."""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def root(self) -> str:
        """The base URL as the vendor's own clients take it, without the version of the API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The base URL, with the version of the API."""
        return f"{self.root}/v1"

    async def __aenter__(self) -> AnthropicVendor:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        refusal = self._refusal(request, body, CREATE_FIELDS)
        if refusal is not None:
            return refusal
        message = self.switches.answers.popleft() if self.switches.answers else answer_to(body)
        if body.get("stream"):
            return await self._stream(request, message)
        return self._send(message.model_dump_json(exclude_unset=True).encode())

    async def _count(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        refusal = self._refusal(request, body, _COUNT_FIELDS)
        if refusal is not None:
            return refusal
        count = MessageTokensCount(input_tokens=input_tokens_of(body))
        return self._send(count.model_dump_json().encode())

    async def _read(self, request: web.Request) -> JSON:
        body: JSON = await request.json()
        self.received.append(Received(path=request.path, body=body, headers=dict(request.headers)))
        return body

    def _refusal(self, request: web.Request, body: JSON, known: frozenset[str]) -> web.Response | None:
        if self.switches.refusals:
            status = self.switches.refusals.popleft()
            return self._refuse(status, f"The service answers {status}.")
        if KEY not in (
            request.headers.get("x-api-key"),
            request.headers.get("authorization", "").removeprefix("Bearer "),
        ):
            return self._refuse(401, "invalid x-api-key")
        version = request.headers.get("anthropic-version", "")
        if version not in VERSIONS:
            return self._refuse(400, "anthropic-version: header is required")
        if body.get("thread"):
            return self._refuse(400, "Threads are not supported here.", error_code="thread_unsupported_request")
        try:
            check(body, known, counts=request.path.endswith("count_tokens"), version=version)
        except Invalid as error:
            return self._refuse(400, str(error))
        return None

    def _refuse(self, status: int, message: str, *, error_code: str = "") -> web.Response:
        headers = {} if self.switches.retry_after is None else {"retry-after": self.switches.retry_after}
        document = error_of(_TYPES[status], message)
        if error_code:
            document["error"]["details"] = {"error_code": error_code}
        return self._send(json.dumps(document).encode(), status=status, headers=headers)

    def _send(self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
        self.sent.append(body)
        headers = {"request-id": f"req_{len(self.received)}", **(headers or {})}
        return web.Response(body=body, status=status, headers=headers, content_type="application/json")

    async def _stream(self, request: web.Request, message: Message) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sent = b""
        for position, event in enumerate(events_of(message, self.switches.piece_bytes)):
            if position == self.switches.cut_after_events:
                assert request.transport is not None
                request.transport.abort()
                break
            if position == self.switches.error_after_events:
                event = error_of("overloaded_error", "Overloaded")
            data = encode(event)
            sent += data
            await response.write(data)
            if position == self.switches.error_after_events:
                break
        self.sent.append(sent)
        return response


def error_of(kind: str, message: str) -> JSON:
    """Returns an error as the service words it."""
    inner = {"type": kind if kind != "request_too_large" else "api_error", "message": message}
    document = ErrorResponse.model_validate({"type": "error", "error": inner, "request_id": "req_1"}).model_dump()
    document["error"]["type"] = kind  # the package has no type for errors that the service's edge makes
    return document


def encode(event: BaseModel | JSON) -> bytes:
    """Returns an event of a stream as bytes."""
    document = event if isinstance(event, dict) else json.loads(event.model_dump_json(exclude_unset=True))
    return b"event: %s\ndata: %s\n\n" % (document["type"].encode(), json.dumps(document).encode())


def check(body: JSON, known: frozenset[str], *, counts: bool = False, version: str = VERSIONS[0]) -> None:
    """Refuses what the service refuses, as far as the proxy could send it.

    Raises:
        Invalid: naming the first thing that is wrong.
    """
    unknown = sorted(body.keys() - (known - _SAMPLING if version == VERSIONS[-1] else known))
    if unknown:
        raise Invalid(f"{unknown[0]}: Extra inputs are not permitted")
    if not counts and not isinstance(body.get("max_tokens"), int):
        raise Invalid("max_tokens: Field required")
    if not 0 <= (body.get("temperature") or 0) <= 1:
        raise Invalid("temperature: range: 0..1")
    if not body["messages"]:
        raise Invalid("messages: at least one message is required")
    if body["messages"][0]["role"] != "user":
        raise Invalid('messages: first message must use the "user" role')
    open_calls: set[str] = set()
    seen: set[str] = set()
    for index, turn in enumerate(body["messages"]):
        blocks = _check_turn(f"messages.{index}", turn)
        results = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        if results - open_calls or open_calls - results:
            raise Invalid(f"messages.{index}: `tool_use` ids and `tool_result` blocks do not match")
        open_calls = {block["id"] for block in blocks if block["type"] == "tool_use"}
        if open_calls & seen:
            raise Invalid(f"messages.{index}: `tool_use` ids must be unique")
        seen |= open_calls
        if turn["role"] == "assistant" and turn is body["messages"][-1] and _ends_blank(blocks):
            raise Invalid("messages: final assistant content cannot end with trailing whitespace")
    if seen and not body.get("tools"):
        raise Invalid("Requests which include `tool_use` or `tool_result` blocks must define tools")
    if body.get("tool_choice") and not body.get("tools"):
        raise Invalid("tool_choice: may only be specified while providing tools")


def _check_turn(place: str, turn: JSON) -> list[JSON]:
    if turn["role"] not in ("user", "assistant"):
        raise Invalid(f"{place}.role: Input should be 'user' or 'assistant'")
    content = turn["content"]
    blocks: list[JSON] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for number, block in enumerate(blocks):
        try:
            _BLOCK.validate_python(block)
        except ValidationError as error:
            raise Invalid(f"{place}.content.{number}: {error.errors()[0]['msg']}") from None
        if block["type"] == "text" and not block["text"].strip():
            raise Invalid(f"{place}: text content blocks must contain non-whitespace text")
        if block["type"] in ("thinking", "redacted_thinking") and "cache_control" in block:
            raise Invalid(f"{place}.content.{number}.cache_control: Extra inputs are not permitted")
    if not blocks:
        raise Invalid(f"{place}: all messages must have non-empty content")
    kinds = [block["type"] == "tool_result" for block in blocks]
    if kinds != sorted(kinds, reverse=True):
        raise Invalid(f"{place}: `tool_result` blocks must come first")
    return blocks


def _ends_blank(blocks: list[JSON]) -> bool:
    return blocks[-1]["type"] == "text" and blocks[-1]["text"][-1:].isspace()


def input_tokens_of(body: JSON) -> int:
    """Returns what a prompt counts: the bytes of its parts as compact JSON."""
    parts = [body.get(name) for name in ("system", "messages", "tools")]
    return len(json.dumps(parts, separators=(",", ":")))


def last_text_of(body: JSON) -> str:
    """Returns the last text that the user or a tool said."""
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return content
    block = content[-1]
    inner = block.get("text") or block.get("content") or block["type"]
    return inner if isinstance(inner, str) else inner[-1].get("text", inner[-1]["type"])


def answer_to(body: JSON) -> Message:
    """Returns the answer to a request: thoughts if asked for, then calls of all tools offered, or an echo."""
    content: list[ContentBlock] = []
    if (body.get("thinking") or {}).get("type") in ("enabled", "adaptive"):
        content.append(ThinkingBlock(type="thinking", thinking=THOUGHT, signature=SIGNATURE))
    choice = body.get("tool_choice") or {"type": "auto"}
    last = body["messages"][-1]["content"]
    has_results = isinstance(last, list) and any(block["type"] == "tool_result" for block in last)
    stop_reason, stop_sequence = "end_turn", None
    if body.get("tools") and choice["type"] != "none" and not has_results:
        tools = [tool for tool in body["tools"] if choice["type"] != "tool" or tool["name"] == choice["name"]]
        content.append(TextBlock(type="text", text="I call."))
        for number, tool in enumerate(tools[: 1 if choice.get("disable_parallel_tool_use") else None]):
            given = {"input": last_text_of(body), "number": number}
            content.append(ToolUseBlock(type="tool_use", id=f"toolu_{number}", name=tool["name"], input=given))
        stop_reason = "tool_use"
    else:
        text = f"You said: {last_text_of(body)}"
        for sequence in body.get("stop_sequences") or ():
            if sequence in text:
                text, stop_reason, stop_sequence = text.partition(sequence)[0], "stop_sequence", sequence
        if len(text) > body["max_tokens"]:
            text, stop_reason = text[: body["max_tokens"]], "max_tokens"
        content.append(TextBlock(type="text", text=text))
    written = sum(len(block.model_dump_json()) for block in content)
    return Message(
        id="msg_01",
        type="message",
        role="assistant",
        model=body["model"],
        content=content,
        stop_reason=stop_reason,  # type: ignore[arg-type]
        stop_sequence=stop_sequence,
        usage=Usage(
            input_tokens=input_tokens_of(body),
            output_tokens=written,
            cache_read_input_tokens=7,
            cache_creation_input_tokens=3,
        ),
    )


def events_of(message: Message, piece_bytes: int) -> Iterator[BaseModel | JSON]:
    """Yields the events of a message's stream."""
    opening = message.model_copy(
        update={
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message.usage.model_copy(update={"output_tokens": 1}),
        }
    )
    yield RawMessageStartEvent(type="message_start", message=opening)
    for index, block in enumerate(message.content):
        start, deltas = _pieces(block, piece_bytes)
        yield RawContentBlockStartEvent(type="content_block_start", index=index, content_block=start)
        if index == 0:
            yield {"type": "ping"}
        for delta in deltas:
            yield RawContentBlockDeltaEvent(type="content_block_delta", index=index, delta=delta)
        yield RawContentBlockStopEvent(type="content_block_stop", index=index)
    yield RawMessageDeltaEvent(
        type="message_delta",
        delta=Delta(
            stop_reason=message.stop_reason, stop_sequence=message.stop_sequence, stop_details=message.stop_details
        ),
        usage=MessageDeltaUsage(output_tokens=message.usage.output_tokens),
    )
    yield RawMessageStopEvent(type="message_stop")


def _pieces(block: ContentBlock, size: int) -> tuple[Any, list[Any]]:
    match block:
        case TextBlock():
            texts = _cut(block.text, size)
            return TextBlock(type="text", text=""), [TextDelta(type="text_delta", text=text) for text in texts]
        case ThinkingBlock():
            deltas: list[Any] = [
                ThinkingDelta(type="thinking_delta", thinking=text) for text in _cut(block.thinking, size)
            ]
            deltas.append(SignatureDelta(type="signature_delta", signature=block.signature))
            return ThinkingBlock(type="thinking", thinking="", signature=""), deltas
        case ToolUseBlock():
            text = json.dumps(block.input) if block.input else ""
            pieces = ["", *_cut(text, size)]
            start = ToolUseBlock(type="tool_use", id=block.id, name=block.name, input={})
            return start, [InputJSONDelta(type="input_json_delta", partial_json=piece) for piece in pieces]
    return block, []


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def message(*content: Any, stop_reason: Any = "end_turn", stop_sequence: str | None = None) -> Message:
    """Returns an answer with usage: 4 tokens read, 6 from the cache, 1 written to it, 5 said."""
    usage = Usage(input_tokens=4, output_tokens=5, cache_read_input_tokens=6, cache_creation_input_tokens=1)
    return Message(
        id="msg_7",
        type="message",
        role="assistant",
        model="m",
        content=list(content),
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=usage,
    )


def said(words: str) -> TextBlock:
    """Returns a text."""
    return TextBlock(type="text", text=words)


def used(tool_id: str = "toolu_1", name: str = "add", **given_input: Any) -> ToolUseBlock:
    """Returns a call of a tool."""
    return ToolUseBlock(type="tool_use", id=tool_id, name=name, input=given_input)


SAID_THOUGHT = ThinkingBlock(type="thinking", thinking="hm", signature="s")
