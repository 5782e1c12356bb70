"""A model server that answers on a raw socket as its script says: for the ways of failing that no HTTP server offers."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Literal

Act = Literal["answer", "hang", "half", "die", "stall"]

_ANSWER = json.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "byte-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "scripted"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
_EVENT = b'data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"s"}}]}\n\n'


class ScriptedBackend:
    """Acts on each call as `act` says, and answers questions for its health with `health` and `metrics`.

    Acts: `answer` at once; `hang` without a byte; `half` of an answer, then the end of the connection; `die` after the
    first event of a stream; `stall` after it, with the connection open.
    """

    def __init__(self, act: Act = "answer") -> None:
        self.act: Act = act
        self.health = 200
        self.metrics = b""
        self.calls = 0
        self.arrived = asyncio.Semaphore(0)
        self.left = asyncio.Semaphore(0)
        """Released once for each call whose caller closed the connection before its answer was over."""
        self.probed = asyncio.Condition()
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The base URL, with the version of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> ScriptedBackend:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def next_probe(self) -> None:
        """Returns when its health was asked once more, and that probe was answered."""
        async with self.probed:
            await self.probed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1]
                length = next((int(v) for k, v in _headers(head) if k == b"content-length"), 0)
                await reader.readexactly(length)
                if path == b"/health":
                    writer.write(_response(b"", self.health))
                    async with self.probed:
                        self.probed.notify_all()
                elif path == b"/metrics":
                    writer.write(_response(self.metrics))
                elif not await self._call(reader, writer):
                    break
                await writer.drain()
        writer.close()

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.calls += 1
        self.arrived.release()
        match self.act:
            case "answer":
                writer.write(_response(_ANSWER))
                return True
            case "half":
                writer.write(_response(_ANSWER)[:-10])
                await writer.drain()
                return False
            case "die" | "stall":
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                writer.write(b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT))
                await writer.drain()
                if self.act == "die":
                    return False
        await reader.read()
        self.left.release()
        return False


def _response(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


def _headers(head: bytes) -> list[tuple[bytes, bytes]]:
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:] if b":" in line]
    return [(name.strip().lower(), value.strip()) for name, _, value in lines]
