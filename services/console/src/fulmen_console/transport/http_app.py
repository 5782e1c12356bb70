"""Routes the requests of the HTTP port; the only handler of unexpected exceptions."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from importlib.resources import files
from typing import Final

import structlog

from fulmen.errors import Draining, FulmenError, InternalError, NotFound
from fulmen_console.gateway.forwarding import Gateway
from fulmen_console.transport.page_app import PageApp
from fulmen_console.transport.services_app import SERVICES_PATH, ServicesApp
from fulmen_console.transport.session_app import CODES_PATH, SESSION_PATH, SessionApp, respond_with_error
from fulmen_console.transport.tinker_app import TINKER_PATH, TinkerApp
from fulmen_service_kit.http.wire import CallerGone, Header, Message, Receive, Scope, Send, respond

__all__ = ["ConsoleApp"]

HEALTH_PATH: Final = "/healthz"
_NO_STORE: Final[Header] = (b"cache-control", b"no-store")
_NO_SNIFF: Final[Header] = (b"x-content-type-options", b"nosniff")
BODY_LIMIT_S: Final = 30.0
"""Time for the body of a request, seconds."""
OPENAPI_PATH: Final = "/openapi.json"
_log = structlog.get_logger()


@lru_cache(maxsize=1)
def _openapi() -> bytes:
    """Returns the description of the rpcs, which tools/openapi.py makes from the protos."""
    return files("fulmen_console").joinpath("openapi.json").read_bytes()


def _in_time(receive: Receive) -> Receive:
    """Returns a `receive` that ends requests whose body does not arrive in time, as if their callers had left."""
    ends_at = asyncio.get_running_loop().time() + BODY_LIMIT_S
    is_whole = False

    async def received() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(ends_at):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        is_whole = not message.get("more_body", False)
        return message

    return received


class ConsoleApp:
    """The ASGI application of the console."""

    def __init__(
        self,
        *,
        gateway: Gateway,
        sessions: SessionApp,
        services: ServicesApp,
        tinker: TinkerApp | None,
        page: PageApp,
        path_prefix: str,
    ) -> None:
        """Initializes the application; paths are below the prefix. `tinker` is None without an algorithm service."""
        self.draining = False
        self._gateway = gateway
        self._sessions = sessions
        self._services = services
        self._tinker = tinker
        self._page = page
        self._prefix = path_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        is_started = False

        async def sent(message: Message) -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                is_cached = any(name == b"cache-control" for name, _ in message["headers"])
                message["headers"] = [*message["headers"], _NO_SNIFF, *(() if is_cached else (_NO_STORE,))]
            await send(message)

        try:
            await self._answer(scope, receive, sent)
        except CallerGone:
            return
        except Exception as error:
            known = error if isinstance(error, FulmenError) else InternalError("The console failed; its log says why.")
            if known is not error or is_started:
                _log.exception("request_failed", path=scope["path"][:256])
            if is_started:
                raise
            await respond_with_error(send, known)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = scope["path"]
        if whole == HEALTH_PATH:
            await respond(
                send, 503 if self.draining else 200, b"draining\n" if self.draining else b"ok\n", b"text/plain"
            )
            return
        if self.draining:
            raise Draining("The console is shutting down. Try again.")
        path = whole.removeprefix(self._prefix) if whole.startswith(f"{self._prefix}/") else ""
        here = {**scope, "path": path, "root_path": self._prefix}
        if path == OPENAPI_PATH and scope["method"] == "GET":
            await respond(send, 200, _openapi())
        elif path in (SESSION_PATH, CODES_PATH):
            await self._sessions(here, receive, send)
        elif path == SERVICES_PATH and scope["method"] == "GET":
            await self._services(here, receive, send)
        elif self._tinker is not None and path.startswith(TINKER_PATH):
            await self._tinker(here, _in_time(receive), send)
        elif path in self._gateway.paths:
            await self._gateway(here, _in_time(receive), send)
        elif path and self._page.has(here):
            await self._page(here, send)
        else:
            await respond_with_error(send, NotFound("This address does not exist."), unread=receive)
