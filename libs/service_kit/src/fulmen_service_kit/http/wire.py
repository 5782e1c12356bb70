"""ASGI helpers: read a body, send a response, detect a disconnected caller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any

from fulmen.errors import MessageTooLarge

Scope = MutableMapping[str, Any]  # Any: as defined by the ASGI specification
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON_TYPE = b"application/json"

# Limits for reading the rest of a rejected body, so that its sender can read the response.
_LINGER_BYTES = 64 * 1024 * 1024
_LINGER_S = 2.0


class CallerGone(Exception):
    """The caller disconnected before its response was complete.

    Attributes:
        was_cut_off: Whether the connection broke. A caller that leaves, or is killed, closes it, unless it leaves in the
            middle of a response: what it has not read then resets the connection, too.
    """

    def __init__(self, *, was_cut_off: bool = False) -> None:
        super().__init__()
        self.was_cut_off = was_cut_off


def header(scope: Scope, name: bytes) -> bytes:
    """Returns the first header with a lower-case name, empty if absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def header_count(scope: Scope, name: bytes) -> int:
    """Returns the number of headers with a lower-case name."""
    return sum(key == name for key, _ in scope["headers"])


def client_address(scope: Scope) -> str:
    """Returns the address of the caller; empty for one on a Unix socket."""
    return str((scope.get("client") or ("",))[0])


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, take: Callable[[int], None] = lambda _: None
) -> bytes:
    """Reads the body of a request; the caller applies a timeout.

    Args:
        scope: Scope of the request.
        receive: ASGI's receive.
        limit_bytes: Maximum size.
        take: Called with the size of each part; its exceptions end the reading.

    Raises:
        MessageTooLarge: If the declared or actual length exceeds the limit.
        CallerGone: If the caller disconnects.
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
    return MessageTooLarge(f"request body exceeds the limit of {limit_bytes} bytes", limit_bytes=limit_bytes)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON_TYPE,
    extra: Iterable[Header] = (),
    unread: Receive | None = None,
) -> None:
    """Sends a complete response; with `unread`, discards the rest of the request's body before its end.

    Closing while the peer is still sending would reset the connection before it reads the response.
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
        await _discard(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def _discard(receive: Receive) -> None:
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


class Departures:
    """Watchers of a connection's loss; one object per connection, in the scope of its requests."""

    __slots__ = ("is_broken", "lost", "watchers")

    def __init__(self) -> None:
        self.lost = self.is_broken = False
        self.watchers: set[Callable[[], None]] = set()

    def tell(self, error: Exception | None = None) -> None:
        """Notifies the watchers that the connection is lost, by an error or because its peer closed it."""
        self.lost, self.is_broken = True, isinstance(error, OSError)
        for watcher in list(self.watchers):
            watcher()


BODY_CAME = "fulmen.body_came"
"""Scope key, set when the whole body has been received: reading it does not wait and needs no timeout."""

DEPARTURES = "fulmen.departures"
"""Scope key of the connection's Departures, set by `HttpServer`."""


class DisconnectWatch:
    """Raises CallerGone in its block as soon as the caller disconnects.

    Notified by the server's protocol: a task waiting for ASGI's `http.disconnect` would add 10 % to the cost of a call.
    """

    __slots__ = ("_departures", "_gone", "_task")

    def __init__(self, scope: Scope) -> None:
        """Initializes the watch with the scope of a request of `HttpServer`."""
        self._departures: Departures = scope[DEPARTURES]
        self._gone = False
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> DisconnectWatch:
        if self._departures.lost:
            raise CallerGone(was_cut_off=self._departures.is_broken)
        self._task = asyncio.current_task()
        self._departures.watchers.add(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.settle()
        # As in asyncio.timeout: only our own cancellation becomes an error.
        if self._gone and self._task is not None:
            mine = self._task.uncancel() == 0
            if mine and kind is asyncio.CancelledError:
                raise CallerGone(was_cut_off=self._departures.is_broken) from error

    def settle(self) -> None:
        """Ends the watch."""
        self._departures.watchers.discard(self._leave)

    def _leave(self) -> None:
        self._gone = True
        if self._task is not None:
            self._task.cancel()
