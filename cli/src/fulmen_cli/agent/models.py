"""Models for a checked agent: an HTTP endpoint, or a built-in one that repeats its input."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

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
        model: What is asked for instead of the model that the agent names; empty: as the agent says.
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
    """A model that repeats the last message; its tokens are words."""

    @property
    def name(self) -> str:
        """Returns a description."""
        return "the built-in model, which repeats its input"

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Answers at once."""
        route = path.partition("?")[0]
        if route.startswith("/v1/models"):
            return _json(200, {"object": "list", "data": [{"id": ECHO_MODEL, "object": "model", "owned_by": "fulmen"}]})
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return _json(400, _refusal("The request is no JSON object."))
        text = _last_text(request)
        given = _words(request.get("messages") or request.get("input") or request.get("prompt"))
        match route:
            case "/v1/chat/completions":
                return _chat(request, text, given)
            case "/v1/messages":
                return _messages(request, text, given)
            case "/v1/responses" if not request.get("stream"):
                return _json(200, _response(request, text, given))
            case "/v1/completions" if not request.get("stream"):
                usage = _usage(given, text)
                choice = {"index": 0, "text": text, "finish_reason": "stop"}
                return _json(200, _envelope(request, "text_completion") | {"choices": [choice], "usage": usage})
            case _:
                streamed = " as a stream" if request.get("stream") else ""
                return _json(404, _refusal(f"The built-in model does not answer {route}{streamed}: give --model-url."))


def _chat(request: Json, text: str, given: int) -> Answer:
    usage = _usage(given, text)
    if not request.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return _json(200, _envelope(request, "chat.completion") | {"choices": [choice], "usage": usage})
    head = _envelope(request, "chat.completion.chunk")
    deltas = [{"role": "assistant", "content": ""}, *({"content": part} for part in _parts(text))]
    events = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events.append(head | {"choices": [], "usage": usage})
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return Answer(status=200, content_type="text/event-stream", pieces=iter([*lines, b"data: [DONE]\n\n"]))


def _messages(request: Json, text: str, given: int) -> Answer:
    message: Json = {
        "id": "msg_check", "type": "message", "role": "assistant", "model": request.get("model", ECHO_MODEL),
        "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": given, "output_tokens": _words(text)},
    }  # fmt: skip
    if not request.get("stream"):
        return _json(200, message)
    started = message | {"content": [], "stop_reason": None, "usage": {"input_tokens": given, "output_tokens": 0}}
    events: list[Json] = [
        {"type": "message_start", "message": started},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": part}}
            for part in _parts(text)
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": _words(text)},
        },
        {"type": "message_stop"},
    ]
    lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
    return Answer(status=200, content_type="text/event-stream", pieces=iter(lines))


def _response(request: Json, text: str, given: int) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": "msg_check", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    tokens = {"input_tokens": given, "output_tokens": _words(text), "total_tokens": given + _words(text)}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": "resp_check", "object": "response", "created_at": 0, "status": "completed", "error": None,
        "model": request.get("model", ECHO_MODEL), "output": [item], "usage": tokens | details,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def _envelope(request: Json, kind: str) -> Json:
    return {"id": "check", "object": kind, "created": 0, "model": request.get("model", ECHO_MODEL)}


def _usage(given: int, text: str) -> Json:
    return {"prompt_tokens": given, "completion_tokens": _words(text), "total_tokens": given + _words(text)}


def _json(status: int, document: Json) -> Answer:
    return Answer(status=status, content_type="application/json", pieces=iter([json.dumps(document).encode()]))


def _refusal(message: str) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "code": None, "param": None}}


def _last_text(request: Json) -> str:
    """Returns the text of the last message, of the input, or of the prompt."""
    turns = request.get("messages") or request.get("input") or request.get("prompt") or ""
    last = turns[-1] if isinstance(turns, list) and turns else turns
    return _plain(last.get("content") if isinstance(last, dict) else last)


def _plain(content: object) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content).strip()
    return content if isinstance(content, str) else ""


def _words(value: object) -> int:
    if isinstance(value, list):
        return sum(_words(_plain(each.get("content")) if isinstance(each, dict) else each) for each in value)
    return len(value.split()) if isinstance(value, str) else 0


def _parts(text: str) -> list[str]:
    return [f"{word} " for word in text.split(" ")[:-1]] + text.split(" ")[-1:]
