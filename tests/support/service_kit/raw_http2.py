"""A client of HTTP/2 that sends gRPC calls by hand, so that it can leave out what a client of gRPC does by itself."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MAX_STREAMS: Final = 3
INITIAL_WINDOW: Final = 4
FRAME_BYTES: Final = 16_384
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class RawHttp2:
    """One connection. It grants the server a window for answers only when `grant` is called."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next_stream = 1
        self._arrived = asyncio.Event()
        self.settings: dict[int, int] = {}
        """What the server allows, by the number of the setting; there once a call is answered."""
        self.answer_bytes: dict[int, int] = {}
        """Bytes of the answer to each call that has begun to be answered."""
        self.over: set[int] = set()
        """Calls that the server has ended."""

    async def call(self, rpc: str, authorization: str, message: bytes, *, size_bytes: int = -1) -> int:
        """Begins a call; returns its number.

        Args:
            rpc: `/package.Service/Method`.
            authorization: Value of the header; none if empty.
            message: The message, encoded.
            size_bytes: Size that the message claims to have, if it is not all of it: the rest is never sent.
        """
        number, self._next_stream = self._next_stream, self._next_stream + 2
        headers = [(":method", "POST"), (":scheme", "http"), (":path", rpc), (":authority", "localhost")]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        headers += [("authorization", authorization)] if authorization else []
        self._send(HEADERS, END_HEADERS, number, b"".join(_literal(name, value) for name, value in headers))
        whole = size_bytes < 0
        body = struct.pack(">BI", 0, len(message) if whole else size_bytes) + message
        for start in range(0, len(body), FRAME_BYTES):
            part = body[start : start + FRAME_BYTES]
            is_last = whole and start + FRAME_BYTES >= len(body)
            self._send(DATA, END_STREAM if is_last else 0, number, part)
        await self._writer.drain()
        return number

    async def grant(self, call: int, size_bytes: int) -> None:
        """Lets the server send bytes of an answer."""
        for stream in (0, call):
            self._send(WINDOW_UPDATE, 0, stream, struct.pack(">I", size_bytes))
        await self._writer.drain()

    async def wait_answered(self, *calls: int) -> None:
        """Waits until the server has begun to answer one of these calls, or ended it."""
        while self.answer_bytes.keys().isdisjoint(calls):
            self._arrived.clear()
            await self._arrived.wait()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    async def _receive(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            size, (kind, flags, stream) = int.from_bytes(head[:3]), struct.unpack(">BBI", head[3:])
            payload = await self._reader.readexactly(size)
            if kind == SETTINGS:
                self.settings |= dict(struct.iter_unpack(">HI", payload))
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._send(kind, ACK, 0, payload if kind == PING else b"")
            if kind in (HEADERS, DATA, RST_STREAM):
                self.answer_bytes[stream] = self.answer_bytes.get(stream, 0) + (size if kind == DATA else 0)
                if kind == RST_STREAM or flags & END_STREAM:
                    self.over.add(stream)
                self._arrived.set()


@asynccontextmanager
async def raw_http2(port: int) -> AsyncIterator[RawHttp2]:
    """Opens a connection to a port of this machine, whose server may send no answers until they are granted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = RawHttp2(reader, writer)
    writer.write(_PREFACE)
    client._send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, 0))
    receiving = asyncio.create_task(client._receive())
    try:
        yield client
    finally:
        receiving.cancel()
        writer.transport.abort()


def _literal(name: str, value: str) -> bytes:
    """Returns a header as HPACK, literal and not indexed."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(size: int) -> bytes:
    """Returns a length as HPACK's integer with a prefix of seven bits."""
    if size < 127:
        return bytes([size])
    encoded, size = bytearray([127]), size - 127
    while size >= 128:
        encoded.append(size % 128 | 128)
        size //= 128
    return bytes([*encoded, size])
