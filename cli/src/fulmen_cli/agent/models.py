"""Models for a checked agent: an HTTP endpoint, or a built-in one that calls the tools and repeats its input."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from fulmen_cli.agent.fake_tools import ToolCall, next_call

__all__ = ["Answer", "EchoModel", "Endpoint", "Models"]

READ_BYTES: Final = 64 * 1024
TIMEOUT_S: Final = 900.0
ECHO_MODEL: Final = "echo"
# Hop-by-hop headers, and those that are set again.
_HOP_HEADERS: Final = frozenset(
    {
        "accept-encoding", "authorization", "connection", "content-length", "host", "keep-alive", "te",
        "transfer-encoding", "upgrade", "x-api-key",
    }
)  # fmt: skip
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP answer; its pieces come as they arrive."""

    status: int
    content_type: str
    pieces: Iterator[bytes]


class Models(Protocol):
    """Answers model calls."""

    @property
    def name(self) -> str:
        """What answers, for a person."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Answers one call, `path` with its query. Raises OSError if nothing can be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An OpenAI-compatible endpoint, or the stack's own proxy.

    Attributes:
        base_url: With its `/v1`, if it has one.
        key: What is sent as key instead of the attempt's. Secret.
        model: Model to call instead of the one that the agent names; empty: the agent's.
    """

    base_url: str
    key: str = field(repr=False)
    model: str = ""

    @property
    def name(self) -> str:
        """Its address."""
        return f"{self.base_url} ({self.model})" if self.model else self.base_url

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Sends the call on."""
        url = urlsplit(self.base_url.rstrip("/"))
        sent = {name: value for name, value in headers.items() if name.lower() not in _HOP_HEADERS}
        if self.key:
            sent |= {"Authorization": f"Bearer {self.key}"}
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(url.netloc, timeout=TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
        connection.request(method, url.path + path.removeprefix("/v1"), body=self._body(body), headers=sent)
        response = connection.getresponse()
        content_type = response.headers.get("Content-Type", "application/json")
        return Answer(status=response.status, content_type=content_type, pieces=_pieces(connection, response))

    def _body(self, body: bytes) -> bytes:
        if not (self.model and body):
            return body
        try:
            document = json.loads(body)
        except ValueError:
            return body
        return json.dumps(document | {"model": self.model}).encode() if isinstance(document, dict) else body


def _pieces(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[bytes]:
    with closing(connection), closing(response):
        while piece := response.read1(READ_BYTES):
            yield piece


@dataclass(frozen=True, slots=True)
class EchoModel:
    """A model that calls each tool once and then repeats the last message; its tokens are words."""

    @property
    def name(self) -> str:
        """Returns a description."""
        return "the built-in model, which calls each tool once and repeats its input"

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Answers immediately."""
        route = path.partition("?")[0]
        if route.startswith("/v1/models"):
            return _json(200, {"object": "list", "data": [{"id": ECHO_MODEL, "object": "model", "owned_by": "fulmen"}]})
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return _json(400, _refusal("The request is not a JSON object."))
        text = _last_text(request)
        given = _words(request.get("messages") or request.get("input") or request.get("prompt"))
        call = next_call(request, text)
        said = _Said(text="" if call else text, call=call, given=given)
        match route:
            case "/v1/chat/completions":
                return _chat(request, said)
            case "/v1/messages":
                return _messages(request, said)
            case "/v1/responses" if not request.get("stream"):
                return _json(200, _response(request, said))
            case "/v1/completions" if not request.get("stream"):
                choice = {"index": 0, "text": text, "finish_reason": "stop"}
                return _json(200, _envelope(request, "text_completion") | {"choices": [choice], "usage": said.usage})
            case _:
                streamed = " as a stream" if request.get("stream") else ""
                return _json(404, _refusal(f"The built-in model does not answer {route}{streamed}: give --model-url."))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What the built-in model answers: a text, or a call of a tool; `given` is the number of prompt tokens."""

    text: str
    call: ToolCall | None
    given: int

    @property
    def arguments(self) -> str:
        """The arguments of the call, as JSON."""
        return json.dumps(self.call.arguments, ensure_ascii=False) if self.call else ""

    @property
    def token_count(self) -> int:
        """The number of completion tokens."""
        return _words(self.text) + (1 + _words(self.arguments) if self.call else 0)

    @property
    def usage(self) -> Json:
        """Token counts of Chat Completions."""
        return {
            "prompt_tokens": self.given,
            "completion_tokens": self.token_count,
            "total_tokens": self.given + self.token_count,
        }


def _chat(request: Json, said: _Said) -> Answer:
    function = {"name": said.call.name, "arguments": said.arguments} if said.call else {}
    call = {"id": said.call.id, "type": "function", "function": function} if said.call else {}
    reason = "tool_calls" if said.call else "stop"
    if not request.get("stream"):
        message: Json = {"role": "assistant", "content": said.text or None, "tool_calls": [call]}
        if not said.call:
            message = {"role": "assistant", "content": said.text}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return _json(200, _envelope(request, "chat.completion") | {"choices": [choice], "usage": said.usage})
    head = _envelope(request, "chat.completion.chunk")
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    if said.call:
        deltas.append({"tool_calls": [{"index": 0, **call}]})
    else:
        deltas += [{"content": part} for part in _parts(said.text)]
    events = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    events.append(head | {"choices": [], "usage": said.usage})
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return Answer(status=200, content_type="text/event-stream", pieces=iter([*lines, b"data: [DONE]\n\n"]))


def _messages(request: Json, said: _Said) -> Answer:
    block: Json = {"type": "text", "text": said.text}
    empty: Json = {"type": "text", "text": ""}
    deltas = [{"type": "text_delta", "text": part} for part in _parts(said.text)]
    if said.call:
        empty = {"type": "tool_use", "id": said.call.id, "name": said.call.name, "input": {}}
        block = empty | {"input": said.call.arguments}
        deltas = [{"type": "input_json_delta", "partial_json": said.arguments}]
    reason = "tool_use" if said.call else "end_turn"
    message: Json = {
        "id": "msg_check", "type": "message", "role": "assistant", "model": request.get("model", ECHO_MODEL),
        "content": [block], "stop_reason": reason, "stop_sequence": None,
        "usage": {"input_tokens": said.given, "output_tokens": said.token_count},
    }  # fmt: skip
    if not request.get("stream"):
        return _json(200, message)
    started = message | {
        "content": [], "stop_reason": None, "usage": {"input_tokens": said.given, "output_tokens": 0},
    }  # fmt: skip
    events: list[Json] = [
        {"type": "message_start", "message": started},
        {"type": "content_block_start", "index": 0, "content_block": empty},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": said.token_count},
        },
        {"type": "message_stop"},
    ]
    lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
    return Answer(status=200, content_type="text/event-stream", pieces=iter(lines))


def _response(request: Json, said: _Said) -> Json:
    part = {"type": "output_text", "text": said.text, "annotations": []}
    item: Json = {
        "id": "msg_check", "type": "message", "role": "assistant", "status": "completed", "content": [part],
    }  # fmt: skip
    if said.call:
        item = {
            "id": "fc_check", "type": "function_call", "status": "completed", "call_id": said.call.id,
            "name": said.call.name, "arguments": said.arguments,
        }  # fmt: skip
    tokens = {
        "input_tokens": said.given, "output_tokens": said.token_count, "total_tokens": said.given + said.token_count,
    }  # fmt: skip
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": "resp_check", "object": "response", "created_at": 0, "status": "completed", "error": None,
        "model": request.get("model", ECHO_MODEL), "output": [item], "usage": tokens | details,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def _envelope(request: Json, kind: str) -> Json:
    return {"id": "check", "object": kind, "created": 0, "model": request.get("model", ECHO_MODEL)}


def _json(status: int, document: Json) -> Answer:
    return Answer(status=status, content_type="application/json", pieces=iter([json.dumps(document).encode()]))


def _refusal(message: str) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "code": None, "param": None}}


def _last_text(request: Json) -> str:
    """Returns the text of the last message, of the input, or of the prompt."""
    turns = request.get("messages") or request.get("input") or request.get("prompt") or ""
    last = turns[-1] if isinstance(turns, list) and turns else turns
    return _plain(last.get("content", last.get("output")) if isinstance(last, dict) else last)


def _plain(content: object) -> str:
    if isinstance(content, list):
        parts = (
            _plain(part.get("text", part.get("content"))) if isinstance(part, dict) else str(part) for part in content
        )
        return " ".join(parts).strip()
    return content if isinstance(content, str) else ""


def _words(value: object) -> int:
    if isinstance(value, list):
        return sum(_words(_plain(each.get("content")) if isinstance(each, dict) else each) for each in value)
    return len(value.split()) if isinstance(value, str) else 0


def _parts(text: str) -> list[str]:
    return [f"{word} " for word in text.split(" ")[:-1]] + text.split(" ")[-1:]
