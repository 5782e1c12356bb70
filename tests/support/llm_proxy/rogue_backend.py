"""A backend on a raw socket that does what no HTTP server does, at the moment that a test says.

It serves every API of both dialects well, unless an act is set: acts write the bytes of an answer themselves.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

JSON = dict[str, Any]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"
MESSAGES: Final = "/v1/messages"
COUNT: Final = "/v1/messages/count_tokens"

STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END: Final = b"0\r\n\r\n"
DONE: Final = b"data: [DONE]\n\n"

_USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
_LOGPROBS: JSON = {"content": [{"token": t, "logprob": -0.5, "bytes": None, "top_logprobs": []} for t in "Hi"]}
_CHAT: JSON = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "byte-model"}
_MESSAGE: JSON = {"id": "msg_1", "type": "message", "role": "assistant", "model": "byte-model"}
_RESPONSE: JSON = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "byte-model", "parallel_tool_calls": True,
    "tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
}  # fmt: skip
_ITEM: JSON = {
    "id": "i1", "type": "message", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "Hi", "annotations": []}],
}  # fmt: skip
_RESPONSE_USAGE = {
    "input_tokens": 2, "output_tokens": 2, "total_tokens": 4,
    "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip

WHOLE: Final[dict[str, JSON]] = {
    CHAT: _CHAT
    | {
        "choices": [
            {
                "index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop",
                "token_ids": [72, 105], "logprobs": _LOGPROBS,
            }
        ],
        "prompt_token_ids": [1, 2],
        "usage": _USAGE,
    },
    COMPLETIONS: {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "byte-model"}
    | {"choices": [{"index": 0, "text": "Hi", "finish_reason": "stop", "logprobs": None}], "usage": _USAGE},
    RESPONSES: _RESPONSE | {"status": "completed", "output": [_ITEM], "usage": _RESPONSE_USAGE},
    EMBEDDINGS: {"object": "list", "model": "byte-model", "data": [{"object": "embedding", "index": 0, "embedding": [1]}]}
    | {"usage": {"prompt_tokens": 2, "total_tokens": 2}},
    MESSAGES: _MESSAGE
    | {
        "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 2, "output_tokens": 2},
    },
    COUNT: {"input_tokens": 2},
}  # fmt: skip
"""A good answer of each API, by its path; that of chat completions can be trained on."""


def event(document: JSON | bytes, *, named: bool = False) -> bytes:
    """Returns one event of a stream."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    name = f"event: {document['type']}\n".encode() if named and isinstance(document, dict) else b""
    return name + b"data: " + data + b"\n\n"


def _chat_chunk(**choice: Any) -> JSON:
    more = {name: choice.pop(name) for name in ("prompt_token_ids",) if name in choice}
    chunk = _CHAT | {"object": "chat.completion.chunk"} | more
    return chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": None} | choice]}


def _logprob(token: str) -> JSON:
    return {"content": [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}]}


def _text_chunk(text: str, finish: str | None) -> JSON:
    whole = WHOLE[COMPLETIONS]
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    return {name: value for name, value in whole.items() if name != "usage"} | {"choices": [choice]}


_STARTED = _MESSAGE | {
    "content": [], "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 2, "output_tokens": 0}
}  # fmt: skip

_RESPONSE_EVENTS: tuple[JSON, ...] = (
    {"type": "response.created", "response": _RESPONSE | {"status": "in_progress", "output": []}},
    {"type": "response.output_item.done", "output_index": 0, "item": _ITEM},
    {"type": "response.completed", "response": WHOLE[RESPONSES]},
)

EVENTS: Final[dict[str, tuple[bytes, ...]]] = {
    CHAT: (
        event(_chat_chunk(delta={"role": "assistant", "content": ""}, prompt_token_ids=[1, 2])),
        event(_chat_chunk(delta={"content": "H"}, token_ids=[72], logprobs=_logprob("H"))),
        event(_chat_chunk(delta={"content": "i"}, token_ids=[105], logprobs=_logprob("i"))),
        event(_chat_chunk(finish_reason="stop")),
        event(_CHAT | {"object": "chat.completion.chunk", "choices": [], "usage": _USAGE}),
        DONE,
    ),
    COMPLETIONS: (
        event(_text_chunk("H", None)),
        event(_text_chunk("i", "stop")),
        DONE,
    ),
    RESPONSES: tuple(
        event(document | {"sequence_number": number}, named=True) for number, document in enumerate(_RESPONSE_EVENTS)
    ),
    MESSAGES: tuple(
        event(document, named=True)
        for document in (
            {"type": "message_start", "message": _STARTED},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"output_tokens": 2},
            },
            {"type": "message_stop"},
        )
    ),
}
"""A good stream of each API that has one."""


def response(
    body: bytes, *headers: bytes, status: bytes = b"200 OK", content_type: bytes = b"application/json"
) -> bytes:
    """Returns a whole answer, with headers beside its type and length."""
    lines = [b"HTTP/1.1 " + status, b"content-type: " + content_type, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """Returns one chunk of a body of unknown length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it arrived.

    Attributes:
        connection: the number of the connection that it came on.
    """

    path: str
    headers: dict[str, str]
    body: bytes
    connection: int


class Peer:
    """The connection of one request, and what was asked."""

    def __init__(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked = asked
        self._reader = reader
        self._writer = writer

    @property
    def whole(self) -> bytes:
        """A good answer to what was asked, as JSON."""
        return json.dumps(WHOLE[self.asked.path]).encode()

    @property
    def events(self) -> tuple[bytes, ...]:
        """A good stream for what was asked."""
        return EVENTS[self.asked.path]

    @property
    def streams(self) -> bool:
        """True if a stream was asked for."""
        return b'"stream"' in self.asked.body and json.loads(self.asked.body).get("stream") is True

    async def send(self, *pieces: bytes) -> None:
        """Sends bytes, each piece by itself."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    def write_now(self, data: bytes) -> None:
        """Sends bytes without waiting."""
        self._writer.write(data)

    async def stream(self, *events: bytes) -> None:
        """Sends the head of a stream, and events."""
        await self.send(STREAM_HEAD, *map(chunk, events))

    async def left(self) -> None:
        """Returns when the proxy has closed the connection."""
        with suppress(ConnectionError):
            while await self._reader.read(65536):
                pass

    def end_writing(self) -> None:
        """Closes its own half of the connection."""
        self._writer.write_eof()

    def abort(self) -> None:
        """Resets the connection."""
        self._writer.transport.abort()


Act = Callable[[Peer], Awaitable[bool]]
"""Answers one request; returns whether the connection goes on."""


async def serve_well(peer: Peer) -> bool:
    """Answers as the API's own server would."""
    # An API without events, such as embeddings, answers whole whatever was asked.
    if peer.streams and peer.asked.path in EVENTS:
        await peer.stream(*peer.events)
        await peer.send(STREAM_END)
    else:
        await peer.send(response(peer.whole))
    return True


def answers(*pieces: bytes, goes_on: bool = False) -> Act:
    """Returns an act that sends bytes and closes the connection, unless it goes on."""

    async def act(peer: Peer) -> bool:
        await peer.send(*pieces)
        return goes_on

    return act


def streams(*events: bytes, ends: bool = True) -> Act:
    """Returns an act that sends events; then the stream ends well, or with the connection."""

    async def act(peer: Peer) -> bool:
        await peer.stream(*events)
        if ends:
            await peer.send(STREAM_END)
        return ends

    return act


def hangs_after(*pieces: bytes) -> Act:
    """Returns an act that sends bytes and then nothing until the proxy leaves."""

    async def act(peer: Peer) -> bool:
        await peer.send(*pieces)
        await peer.left()
        return False

    return act


class RogueBackend:
    """The server; `async with RogueBackend() as backend` runs one in the current event loop.

    Attributes:
        act: answers requests.
        next_acts: answer the next requests instead, one each.
        asked: every call so far; questions for its health are not noted.
        left: released for each connection that is over.
    """

    def __init__(self) -> None:
        self.act: Act = serve_well
        self.next_acts: deque[Act] = deque()
        self.asked: list[Asked] = []
        self.arrived = asyncio.Semaphore(0)
        self.left = asyncio.Semaphore(0)
        self.port = 0
        self._connections = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """The base URL, with the version of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def will(self, *acts: Act) -> int:
        """Sets the acts of the next requests; returns how many there were before."""
        self.next_acts.clear()
        self.next_acts.extend(acts)
        return len(self.asked)

    async def question(self, path: str) -> bytes:
        """Answers a question about its health: there is none."""
        return response(b"", status=b"404 Not Found")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        number = self._connections
        self._connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one(number, reader, writer):
                    pass
        finally:
            writer.close()
            self.left.release()

    async def _one(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = [line.partition(": ") for line in head[1:] if line]
        headers = {name.lower(): value for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            writer.write(await self.question(path))
            return True
        asked = Asked(path=path, headers=headers, body=body, connection=number)
        self.asked.append(asked)
        self.arrived.release()
        act = self.next_acts.popleft() if self.next_acts else self.act
        return await act(Peer(asked, reader, writer))
