"""uvicorn, embedded in the service's process and lifecycle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fulmen.rpc.tls import TlsFiles
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.http.answers import HttpApp, OneWrite, Unframed
from fulmen_service_kit.http.wire import BODY_CAME, DEPARTURES, Departures
from fulmen_service_kit.security.tls import http_context

_BACKLOG = 4096
_KEEP_ALIVE_S = 75
ANSWERS_SHARE: Final = 0.8
"""Share of the grace period in which responses may finish; the rest is for recording those that were cut off."""

_LINGER_S = 1.0
# An interim response, of which clients skip any number: a client that has left answers it with a reset.
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE_S, _LAST_PROBE_S = 0.05, 5.0
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # of Linux
_TCP_CLOSE = 7
_OF_UPGRADES = frozenset({b"connection", b"upgrade", b"http2-settings"})

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 128
MAX_URL_BYTES: Final = 8 * 1024
HEAD_LIMIT_S = 30.0
"""Timeout for the head of a request, from the opening of the connection or the first byte."""
WRITE_TIMEOUT_S: Final = 60.0
"""Time without progress after which a connection with unsent response data is closed."""


def _refusal(status: bytes, code: str, message: str) -> bytes:
    # An error in the formats of both OpenAI's and Anthropic's API.
    error = {"type": "invalid_request_error", "code": code, "message": message, "param": None}
    body = json.dumps({"type": "error", "error": error}).encode()
    head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_URL_TOO_LONG: Final = _refusal(b"414 URI Too Long", "url_too_long", f"URL exceeds {MAX_URL_BYTES} bytes")
_HEAD_TOO_LARGE: Final = _refusal(
    b"431 Request Header Fields Too Large",
    "headers_too_large",
    f"headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} fields",
)
_HEAD_TOO_LATE: Final = _refusal(b"408 Request Timeout", "request_timeout", "request was not received in time")
_MALFORMED: Final = _refusal(b"400 Bad Request", "request_malformed", "request is not valid HTTP")


class HttpServer:
    """Background role: serves an ASGI application on a bound socket; a drain lets answers finish."""

    def __init__(
        self,
        *,
        app: HttpApp,
        listener: socket.socket,
        grace_s: float,
        private: socket.socket | None = None,
        tls: TlsFiles | None = None,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        """Initializes the server.

        Args:
            app: Answers the requests.
            listener: The bound port.
            grace_s: Grace period of a drain, in seconds.
            private: A second bound socket, for the service's own processes.
            tls: The server's certificate, also used on the private socket; None for no TLS.
            write_timeout_s: Time without progress after which a connection with unsent data is closed, in seconds.

        Raises:
            StartupError: If a file of `tls` is unusable.
        """

        class Protocol(BoundedHttpProtocol):
            pass

        Protocol.write_timeout_s = write_timeout_s
        self._app = app
        self._listener = listener
        self._private = private
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(grace_s * ANSWERS_SHARE)),
        )
        config.load()
        config.ssl = None if tls is None else http_context(tls)
        self._server = _EmbeddedServer(config)
        self._stopped = asyncio.Event()

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._listener.getsockname()[1])

    async def run(self) -> None:
        """Serves until drained, then waits to be cancelled, as a role must."""
        try:
            await self._server.serve(sockets=[s for s in (self._listener, self._private) if s is not None])
        finally:
            # uvicorn does not close its sockets when cancelled.
            for listening in getattr(self._server, "servers", ()):
                listening.close()
            self._stopped.set()
        if not self._app.draining:
            return
        await asyncio.Event().wait()

    def close(self) -> None:
        """Closes the sockets, also if the server never ran."""
        self._listener.close()
        if self._private is not None:
            self._private.close()

    async def drain(self) -> None:
        """Rejects new requests and waits until pending responses are complete; the caller applies a timeout."""
        self._app.draining = True
        self._server.should_exit = True
        await self._stopped.wait()


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the head of a request, a write timeout, and notification of lost connections.

    A head that exceeds a limit is answered with 414 or 431, one that does not arrive in time with 408, and malformed HTTP
    with 400; then the connection is closed. Earlier requests on the connection are answered first, later ones are not.
    A connection whose peer reads nothing for `write_timeout_s` is closed; a slow reader is not. A peer that has closed its own
    half gets its response, unless it has left: then it refuses the next bytes, so that an interim response tells.
    """

    write_timeout_s = WRITE_TIMEOUT_S
    _in_body = False
    _in_head = False
    _head_bytes = 0
    _refusal = b""
    _refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0
    _data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Starts the timeout for the first request."""
        super().connection_made(transport)
        self._departures = Departures()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers and notifies the watchers."""
        self._forget_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._forget_write_timer()
        super().connection_lost(exc)
        self._departures.tell(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # as asyncio's own
        """Returns True to keep the connection open, if the peer may be waiting for the response to its last request."""
        # Within a response nothing can be requested, and a stall could last: the peer counts as disconnected.
        if not self._may_be_probed() or self.cycle.more_body or self.pipeline:
            return None
        self.cycle.keep_alive = False
        self._probe(_FIRST_PROBE_S)
        return True

    def _may_be_probed(self) -> bool:
        """Returns whether the response has not begun, and interim responses and the connection's state can be had."""
        if _TCP_INFO is None or self.scheme == "https" or self.client is None or self.cycle is None:
            return False
        return not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1"

    def _probe(self, wait_s: float) -> None:
        self.transport.write(_PROBE)
        self._probe_timer = self.loop.call_later(wait_s, self._check_peer, wait_s)

    def _check_peer(self, waited_s: float) -> None:
        """Closes the connection if the peer has refused the probe, otherwise probes again, as long as no response has begun."""
        connection = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or not self._may_be_probed():
            return
        if connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        else:
            self._probe(min(2 * waited_s, _LAST_PROBE_S))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # Any: as uvicorn's own
        answering: Any = Unframed(cycle, app) if cycle.scope["http_version"] == "1.0" else OneWrite(cycle, app)
        super()._start_asgi_task(cycle, answering)

    def data_received(self, data: bytes) -> None:
        """Parses data, counting it unless it belongs to a body."""
        if self._refused:
            return
        if not self._in_body:
            self._head_bytes += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._in_head and not self._refused:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)
            elif self._head_timer is None:
                self._await_head()

    def on_message_begin(self) -> None:
        """Records the start of a request."""
        self._in_head = True
        super().on_message_begin()
        self.scope[DEPARTURES] = self._departures  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        """Checks the head.

        Raises:
            ValueError: If it exceeds a limit, has no host or several, or is a CONNECT; the parser stops and calls `send_400_response`.
        """
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = _URL_TOO_LONG
        elif len(self.headers) > MAX_HEADERS or (self._head_bytes > MAX_HEAD_BYTES and self._size() > MAX_HEAD_BYTES):
            self._refusal = _HEAD_TOO_LARGE
        if self._refusal:
            raise ValueError("head of the request is too large")
        hosts = sum(name == b"host" for name, _ in self.headers)
        # RFC 9112, 3.2: proxies in front and services must not differ about the host of a request.
        if hosts > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            raise ValueError("request needs one host")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("CONNECT is not supported")
            return  # parsed again without the upgrade
        super().on_headers_complete()
        self._forget_timer()
        self._in_head, self._in_body = False, True

    def on_message_complete(self) -> None:
        """Resets the count."""
        if self.parser.should_upgrade():
            return
        self._in_body, self._head_bytes = False, 0
        self.scope[BODY_CAME] = True  # type: ignore[literal-required]
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that the parser has rejected."""
        if self._refusal:
            self._refuse(self._refusal)
        else:
            self._refuse(_MALFORMED)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignores the offered upgrade: parses the request again without it, since the parser would stop at the body."""
        error = sys.exc_info()[1]
        assert isinstance(error, httptools.HttpParserUpgrade)
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] not in _OF_UPGRADES]
        self.parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + self._data[error.args[0] :])

    def pause_writing(self) -> None:
        """Starts the write timeout."""
        super().pause_writing()
        self._await_progress()

    def resume_writing(self) -> None:
        """Cancels the write timeout."""
        self._forget_write_timer()
        super().resume_writing()

    def _await_progress(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_progress)

    def _check_progress(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_progress()
        else:
            self.transport.abort()

    def _forget_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _size(self) -> int:
        # The chunk with the end of the head may contain much of the body.
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_LIMIT_S, self._refuse, _HEAD_TOO_LATE)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, answer: bytes) -> None:
        self._forget_timer()
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if not self._in_body:
                # Another response is being sent: do not write into it.
                self.cycle.keep_alive = False
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._in_body and self.cycle.response_started:
            self.transport.close()
            return
        # Closing while the peer is still sending would reset the connection before it reads the response.
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without signal handlers; signals belong to the lifecycle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Binds a listening socket; connections are queued until the server runs.

    Args:
        host: Address.
        port: Port; 0 for a free one.
        shared: Whether other processes listen on the same port (SO_REUSEPORT).

    Raises:
        StartupError: If the address is in use or not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port} (HTTP): port is in use or not permitted. Choose another port."
        ) from None
    listener.setblocking(False)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Binds a port without listening, to reserve it for the service's processes.

    Raises:
        StartupError: If the port is in use or not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: port is in use or not permitted. Choose another port."
        ) from None
    return held


def bind_private(path: Path) -> socket.socket:
    """Binds a Unix socket, replacing a stale one."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
