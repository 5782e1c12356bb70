"""The floor: uvicorn and aiohttp passing bytes on, with nothing else. `python passthrough.py PORT BACKEND`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import uvicorn

Message = MutableMapping[str, Any]


class PassThrough:
    """Sends every request to one backend, and its answer back as it comes."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            return
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json"},
                auto_decompress=False,
            )
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        async with self._session.request(scope["method"], self._backend + scope["path"], data=bytes(body)) as answer:
            headers = [(b"content-type", answer.headers["Content-Type"].encode())]
            if answer.content_length is not None:
                headers.append((b"content-length", b"%d" % answer.content_length))
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            while chunk := await answer.content.readany():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(
        PassThrough(f"http://{sys.argv[2]}"),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=4096,
    )
