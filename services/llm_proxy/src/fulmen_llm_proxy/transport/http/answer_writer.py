"""Writes an answer over ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from fulmen_llm_proxy.calls.answer_writer import Header
from fulmen_service_kit.http_wire import DisconnectWatch, Scope, Send, respond

STARTED = "fulmen.answer_started"
"""Scope key of a request whose answer has started."""


class HttpAnswerWriter:
    """Writes the answer of one HTTP request."""

    __slots__ = ("_scope", "_send")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send

    def watch(self) -> DisconnectWatch:
        """Returns a watch for the caller's disconnect."""
        return DisconnectWatch(self._scope)

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Writes a complete answer."""
        self._scope[STARTED] = True
        await respond(self._send, status, body, content_type, extra)

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Writes the headers of a stream."""
        self._scope[STARTED] = True
        headers = [(b"content-type", content_type), (b"cache-control", b"no-cache"), *extra]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def piece(self, data: bytes) -> Awaitable[None]:
        """Writes events."""
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the stream."""
        await self._send({"type": "http.response.body", "body": b""})
