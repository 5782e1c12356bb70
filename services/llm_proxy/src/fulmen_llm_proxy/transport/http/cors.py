"""Cross-origin requests: which web pages may call the model APIs from a browser.

Source: the Fetch standard of WHATWG, section 3.2. Credentials of the browser, such as cookies, are never allowed: callers
send their key in a header.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Collection
from typing import Final

from fulmen_service_kit.http.answers import HttpApp
from fulmen_service_kit.http.wire import Header, Message, Receive, Scope, Send, header, respond

_ANY: Final = b"*"
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_MAX_NAMES_BYTES = 4096
_METHODS = b"GET, POST, DELETE"
_MAX_AGE_S = 600


class Cors:
    """Answers browsers' preflight requests, and allows pages of some origins to read the answers of an application."""

    def __init__(self, app: HttpApp, origins: Collection[str]) -> None:
        """Sets the origins, such as `https://app.example.com`; `*` is any."""
        self._app = app
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    @property
    def draining(self) -> bool:
        """Whether the application accepts no more calls."""
        return self._app.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._app.draining = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        allowed = self._allowed(scope) if scope["type"] == "http" else b""
        if not allowed:
            await self._app(scope, receive, send)
            return
        common = [(b"access-control-allow-origin", allowed), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            await respond(send, 200, b"", b"text/plain", [*common, *_permissions(scope)])
            return
        extra = [*common, (b"access-control-expose-headers", b"*")]

        def sent(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            return send(message)

        await self._app(scope, receive, sent)

    def _allowed(self, scope: Scope) -> bytes:
        """Returns the origin to allow; empty if the request is not of a page that is."""
        origin = header(scope, b"origin")
        if origin and _ANY in self._origins:
            return _ANY
        return origin if origin.lower() in self._origins else b""


def _permissions(scope: Scope) -> list[Header]:
    wanted = header(scope, b"access-control-request-headers")
    if len(wanted) > _MAX_NAMES_BYTES or not _NAMES.fullmatch(wanted):
        wanted = b""
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", wanted or _ANY),
        (b"access-control-max-age", b"%d" % _MAX_AGE_S),
    ]
