"""What the worker reaches: the address of one vendor, and of that every answer up to a size."""

import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

__all__ = ["CURRENT", "Call", "Egress", "Limits", "vendor_session"]

ALSO_REACHED: Final[Mapping[str, str]] = {"vertex_ai": "https://oauth2.googleapis.com"}
"""Where a vendor exchanges a key of a service account for a token."""

_PORTS: Final = {"http": 80, "https": 443}
_MAX_ADDRESSES: Final = 10_000
_READABLE: Final = ("/etc/pki", "/etc/ssl", "/usr/lib", "/usr/share")
_NO_LOOKUPS: Final = frozenset({"socket.gethostbyaddr", "socket.gethostbyname", "socket.sendmsg", "socket.sendto"})
_PROCESSES: Final = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts in seconds, and the largest answer in bytes; for a stream, all of it together."""

    connect_timeout_s: float
    read_timeout_s: float
    max_answer_bytes: int


@dataclass(kw_only=True)
class Call:
    """What the vendor answered to one call.

    Attributes:
        key: the vendor's key.
        status: status of its last answer; 0 if it has not answered.
        body: body of an error.
        retry_after: `Retry-After` of an error.
        too_large: whether the answer exceeds the limit.
        broken: whether the vendor could not be reached, or broke off.
        late: whether it did not answer in time.
        led_elsewhere: whether the request would have led to another address, such as an image's.
    """

    key: str = field(repr=False)
    status: int = 0
    body: bytes = b""
    retry_after: str = ""
    too_large: bool = False
    broken: bool = False
    late: bool = False
    led_elsewhere: bool = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes how a connection fails within the block."""
        try:
            yield
        except httpx.TimeoutException:
            self.late = True
            raise
        except httpx.TransportError:
            self.broken = True
            raise


CURRENT: ContextVar[Call] = ContextVar("CURRENT")
"""The call that a connection is made for."""

Origin = tuple[str, str, int]
"""Scheme, host and port."""


class Egress:
    """Lets this process reach the addresses of one vendor: an audit hook, which nothing can remove.

    Source: Python's table of audit events.
    """

    def __init__(self, base_url: str, provider: str) -> None:
        """Notes the addresses.

        Args:
            base_url: the vendor's.
            provider: its name in LiteLLM's words.
        """
        self.origins = frozenset(_origin_of(url) for url in (base_url, ALSO_REACHED.get(provider)) if url)
        self._hosts = {host for _, host, _ in self.origins}
        self._ports = {port for _, _, port in self.origins}
        self._addresses = set(self._hosts)  # one that is a number is not looked up
        self._folders: tuple[str, ...] = ()

    def install(self) -> None:
        """Begins to refuse all other addresses, and other processes, for the rest of this one's life."""
        look_up = socket.getaddrinfo

        def noted(*args: Any, **kwargs: Any) -> Any:
            found = look_up(*args, **kwargs)
            if len(self._addresses) > _MAX_ADDRESSES:
                self._addresses = set(self._hosts)
            self._addresses.update(str(each[4][0]) for each in found)
            return found

        socket.getaddrinfo = noted
        sys.addaudithook(self._check)

    def close_files(self, *environments: str) -> None:
        """Begins to refuse all files except the environment's, the system's libraries and its configuration."""
        self._folders = tuple(os.path.realpath(each) + os.sep for each in (*environments, *_READABLE))

    def _check(self, event: str, args: tuple[Any, ...]) -> None:
        match event:
            case "socket.getaddrinfo":
                host = args[0].decode("ascii", "replace") if isinstance(args[0], bytes) else args[0]
                allowed = host in self._hosts
            case "socket.connect":
                allowed = isinstance(args[1], tuple) and args[1][0] in self._addresses and args[1][1] in self._ports
            case "open":
                allowed = not self._folders or not isinstance(args[0], str | bytes) or self._may_open(args[0], args[2])
            case _:
                allowed = event not in _NO_LOOKUPS and event not in _PROCESSES
        if not allowed:
            raise PermissionError(f"{event} is refused")

    def _may_open(self, path: str | bytes, flags: int | None) -> bool:
        real = os.path.realpath(os.fsdecode(path))
        writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        return real == os.devnull or (not writes and real.startswith(self._folders))


def vendor_session(origins: frozenset[Origin], limits: Limits) -> httpx.AsyncClient:
    """Returns an HTTP client that reaches the origins only, follows no redirect, and bounds what it reads."""
    return httpx.AsyncClient(transport=_ToVendor(origins, limits), trust_env=False, follow_redirects=False)


class _ToVendor(httpx.AsyncBaseTransport):
    def __init__(self, origins: frozenset[Origin], limits: Limits) -> None:
        self._origins = origins
        self._max_bytes = limits.max_answer_bytes
        self._timeout = httpx.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s).as_dict()
        self._inner = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context(),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        call = CURRENT.get()
        if _origin_of(str(request.url)) not in self._origins:
            call.led_elsewhere = True
            raise httpx.ConnectError("This address is not the vendor's.")
        request.headers["Accept-Encoding"] = "identity"  # bytes are counted as they come
        request.extensions["timeout"] = self._timeout
        with call.noting():
            sent = await self._inner.handle_async_request(request)
        stream = _Bounded(sent.stream, self._max_bytes, call)
        answer = httpx.Response(sent.status_code, headers=sent.headers, stream=stream, extensions=sent.extensions)
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            await answer.aclose()
            raise httpx.ReadError("The answer is compressed although that was not requested.")
        call.status = answer.status_code
        if answer.is_error:
            call.body = await answer.aread()
            call.retry_after = answer.headers.get("Retry-After", "")[:100]
        return answer

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, inner: Any, max_bytes: int, call: Call) -> None:
        self._inner = inner
        self._left = max_bytes
        self._call = call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._call.noting():
            async for piece in self._inner:
                self._left -= len(piece)
                if self._left < 0:
                    self._call.too_large = True
                    raise httpx.ReadError("The answer is too large.")
                yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


def _origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
