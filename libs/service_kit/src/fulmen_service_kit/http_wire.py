"""ASGI in a few functions: read a body, send a document, notice that the caller left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any

from fulmen.errors import MessageTooLarge

Scope = MutableMapping[str, Any]  # Any: the shape that the ASGI specification gives
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON_TYPE = b"application/json"

# How much of a refused body is still read, and for how long, so that its sender gets to see the refusal.
_LINGER_BYTES = 64 * 1024 * 1024
_LINGER_S = 2.0


class CallerGone(Exception):
    """The caller closed its connection before its answer was complete."""


def header(scope: Scope, name: bytes) -> bytes:
    """Returns the first header of that lower-case name, or nothing."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, take: Callable[[int], None] = lambda _: None
) -> bytes:
    """Reads the request's body; the caller gives the deadline.

    Args:
        take: Is told the size of each part before the next is read; what it raises ends the reading.

    Raises:
        MessageTooLarge: as soon as the length is declared or found to be over the limit.
        CallerGone: if the caller leaves first.
    """
    declared = header(scope, b"content-length")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        part = message.get("body", b"")
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        take(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts) if len(parts) > 1 else parts[0]


def _too_large(limit_bytes: int) -> MessageTooLarge:
    return MessageTooLarge(f"The request body is over the limit of {limit_bytes} bytes.", limit_bytes=limit_bytes)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON_TYPE,
    extra: Iterable[Header] = (),
    unread: Receive | None = None,
) -> None:
    """Sends a whole answer; if the request's body is still `unread`, throws that away before it ends.

    A connection that is closed while its peer still sends is reset, and the peer never sees the answer.
    """
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *extra,
            ],
        }
    )
    if unread is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _throw_away(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def _throw_away(receive: Receive) -> None:
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


class Departures:
    """Who wants to know when a connection is lost; one object per connection, in the scope of its requests."""

    __slots__ = ("lost", "watchers")

    def __init__(self) -> None:
        self.lost = False
        self.watchers: set[Callable[[], None]] = set()

    def tell(self) -> None:
        """Says that the connection is lost."""
        self.lost = True
        for watcher in list(self.watchers):
            watcher()


BODY_CAME = "fulmen.body_came"
"""In the scope of a request whose body has come to its end: reading it waits for nothing, and needs no deadline."""

DEPARTURES = "fulmen.departures"
"""Where a scope of `HttpServer` has its connection's Departures."""


class DisconnectWatch:
    """Raises CallerGone in its block as soon as the caller closes the connection.

    It hears of it from the server's protocol itself: a task that waits for ASGI's `http.disconnect` instead would cost
    every call a tenth of what it costs altogether.
    """

    __slots__ = ("_departures", "_gone", "_task")

    def __init__(self, scope: Scope) -> None:
        """Takes the scope of a request that `HttpServer` serves."""
        self._departures: Departures = scope[DEPARTURES]
        self._gone = False
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> DisconnectWatch:
        if self._departures.lost:
            raise CallerGone
        self._task = asyncio.current_task()
        self._departures.watchers.add(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.settle()
        # The same protocol as asyncio.timeout: only a cancellation that is ours becomes an error.
        if self._gone and self._task is not None:
            mine = self._task.uncancel() == 0
            if mine and kind is asyncio.CancelledError:
                raise CallerGone from error

    def settle(self) -> None:
        """Ends the watch: from here on the caller's leaving is no news."""
        self._departures.watchers.discard(self._leave)

    def _leave(self) -> None:
        self._gone = True
        if self._task is not None:
            self._task.cancel()
