"""How answers are written to uvicorn's connections."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from fulmen_service_kit.http.wire import Message, Receive, Scope, Send

_NO_NAME = re.compile(rb'[\x00-\x20()<>@,;:\[\]={}\\"/?\x7f-\xff]')
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""What names and values of headers may not contain: as in uvicorn, but searched for in all of them in one pass."""
_FRAMING = frozenset({b"connection", b"transfer-encoding"})


class HttpApp(Protocol):
    """An ASGI application that can stop accepting calls."""

    draining: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        ...


class OneWrite:
    """ASGI: writes a complete answer with one call, head and body together. uvicorn writes them one after the other.

    An answer of known length is held until its body comes; all others, and connections that are to be closed, are uvicorn's.
    """

    __slots__ = ("_app", "_cycle", "_start")

    def __init__(self, cycle: RequestResponseCycle, app: HttpApp) -> None:
        self._cycle = cycle
        self._app = app
        self._start: Message | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        start, cycle = self._start, self._cycle
        if start is None:
            if message["type"] == "http.response.start" and not cycle.response_started:
                self._start = message
                if any(name == b"content-length" for name, _ in message["headers"]):
                    return
                self._start = None
            await cycle.send(message)  # type: ignore[arg-type]  # uvicorn's names for the same
            return
        self._start = None
        head = None if message.get("more_body", False) else self._head(start, len(message["body"]))
        if head is None:
            await cycle.send(start)  # type: ignore[arg-type]
            await cycle.send(message)  # type: ignore[arg-type]
            return
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(head + message["body"])
        cycle.message_event.set()
        cycle.on_response()

    def _head(self, start: Message, size_bytes: int) -> bytes | None:
        """Returns the head of a complete answer; None if only uvicorn can write it, or refuses to."""
        cycle = self._cycle
        if cycle.disconnected or cycle.flow.write_paused or not cycle.keep_alive or cycle.scope["method"] == "HEAD":
            return None
        headers = [*cycle.default_headers, *start["headers"]]
        names, values = zip(*headers, strict=True)
        if _NO_NAME.search(b"".join(names)) or _NO_VALUE.search(b"".join(values)) or not _FRAMING.isdisjoint(names):
            return None
        if any(name == b"content-length" and value != b"%d" % size_bytes for name, value in headers):
            return None
        lines = b"".join([b"%b: %b\r\n" % line for line in headers])
        return STATUS_LINE[start["status"]] + lines + b"\r\n"


class Unframed:
    """ASGI: answers an HTTP/1.0 client, which knows no chunks: a body of unknown length ends with its connection.

    Source: RFC 9112, sections 6.1 and 6.3.
    """

    def __init__(self, cycle: RequestResponseCycle, app: HttpApp) -> None:
        self._cycle = cycle
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, unframed = self._cycle, False

        async def sent(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if unframed:
                    # uvicorn then writes the body as it comes, and counts its bytes.
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif unframed and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, sent)
