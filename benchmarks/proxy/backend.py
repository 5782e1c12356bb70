"""The canned backend: a process that answers HTTP as cheaply as Python can, so that it is not what is measured.

`python -m benchmarks.proxy.backend` prints its port. GET answers `{"calls": N}`, how many calls it has had.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import cache
from typing import cast

import httptools
import uvloop

from benchmarks.proxy import answers

_STREAM = re.compile(rb'"stream"\s*:\s*true')
_IDS = re.compile(rb'"return_token_ids"\s*:\s*true')
_USAGE = re.compile(rb'"include_usage"\s*:\s*true')
_PACE = re.compile(rb"pace:([0-9.]+)")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@cache
def _whole(size: str, ids: bool) -> bytes:
    body = answers.whole(size, ids=ids)
    return _HEAD % len(body) + body


@cache
def _pieces(ids: bool, usage: bool) -> tuple[bytes, ...]:
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in answers.events(ids=ids, usage=usage)]
    return (_STREAM_HEAD + chunks[0], *chunks[1:-1], chunks[-1] + b"0\r\n\r\n")


@cache
def _burst(ids: bool, usage: bool) -> bytes:
    return b"".join(_pieces(ids, usage))


class CannedBackend(asyncio.Protocol):
    """One connection."""

    calls = 0

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answers each complete request."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_body(self, body: bytes) -> None:
        """Gathers the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answers."""
        body, self._body = self._body, b""
        if self._parser.get_method() != b"POST":
            text = b'{"object":"list","data":[],"calls":%d}' % CannedBackend.calls
            self._transport.write(_HEAD % len(text) + text)
            return
        CannedBackend.calls += 1
        ids = _IDS.search(body) is not None
        if _STREAM.search(body) is None:
            self._transport.write(_whole("rl" if b"size:rl" in body else "small", ids))
            return
        usage = _USAGE.search(body) is not None
        pace = _PACE.search(body)
        pace_s = float(pace[1]) / 1000 if pace else 0.0
        if not pace_s:
            self._transport.write(_burst(ids, usage))
            return
        self._next(_pieces(ids, usage), 0, self._loop.time(), pace_s)

    def _next(self, pieces: tuple[bytes, ...], number: int, began: float, pace_s: float) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(pieces[number])
        number += 1
        if number < len(pieces):
            self._loop.call_at(began + number * pace_s, self._next, pieces, number, began, pace_s)


async def serve() -> None:
    """Serves until it is terminated."""
    server = await asyncio.get_running_loop().create_server(CannedBackend, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
