"""An answer over ASGI."""

from __future__ import annotations

from collections.abc import Sequence

from fulmen_llm_proxy.calls.sink import Header
from fulmen_service_kit.http_wire import DisconnectWatch, Receive, Send, respond


class HttpSink:
    """Sends one answer to one HTTP request."""

    __slots__ = ("_receive", "_send")

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    def watch(self) -> DisconnectWatch:
        """Returns a watch; the request's body must have been read."""
        return DisconnectWatch(self._receive)

    async def whole(self, status: int, body: bytes, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Sends a whole answer."""
        await respond(self._send, status, body, content_type, extra)

    async def begin(self, content_type: bytes, extra: Sequence[Header] = ()) -> None:
        """Sends the head of a stream."""
        headers = [(b"content-type", content_type), (b"cache-control", b"no-cache"), *extra]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def piece(self, data: bytes) -> None:
        """Sends events."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the stream."""
        await self._send({"type": "http.response.body", "body": b""})
