"""uvicorn inside the service's own process and lifecycle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Protocol

import uvicorn

from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.http_wire import Receive, Scope, Send

_BACKLOG = 4096
_KEEP_ALIVE_S = 75
_SHARE_OF_GRACE = 0.8


class Door(Protocol):
    """An ASGI application that can be told to take no new calls."""

    draining: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        ...


class HttpServer:
    """Serves the door on a bound socket: a background role, with a drain that lets answers finish."""

    def __init__(self, *, door: Door, listener: socket.socket, grace_s: float) -> None:
        self._door = door
        self._listener = listener
        config = uvicorn.Config(
            door,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            # Streams that are cut at the end of the grace still need some of it to reach the store.
            timeout_graceful_shutdown=max(1, int(grace_s * _SHARE_OF_GRACE)),
        )
        self._server = _EmbeddedServer(config)
        self._stopped = asyncio.Event()

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self._listener.getsockname()[1])

    async def run(self) -> None:
        """Serves until it is drained, and then waits to be cancelled, as a role must."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            # A cancelled server does not close its own.
            for listening in getattr(self._server, "servers", ()):
                listening.close()
            self._stopped.set()
        if not self._door.draining:
            return
        await asyncio.Event().wait()

    def close(self) -> None:
        """Gives the port back, also if the server never ran."""
        self._listener.close()

    async def drain(self) -> None:
        """Takes no new calls and returns when the answers under way are complete; the caller limits it."""
        self._door.draining = True
        self._server.should_exit = True
        await self._stopped.wait()


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without signal handlers: the lifecycle owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Binds the listening socket; from here on connections wait for the server instead of being refused.

    Raises:
        StartupError: If the address is in use or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise StartupError(
            f"Cannot listen on {host}:{port} (HTTP): the port is in use or not allowed. Choose another."
        ) from None
    listener.setblocking(False)
    return listener
