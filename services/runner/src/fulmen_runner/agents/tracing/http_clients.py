"""Calls back before each request of common HTTP clients; the callback may change the headers.

Invariant: a library is hooked once per process, now or when it is imported; existing clients are covered. Only the
callback changes requests. Depends on wrapt alone, since it is also loaded in Python commands.
"""

from __future__ import annotations

import http.client
import importlib
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import wrapt

_DEFAULT_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int | None]
OnRequest = Callable[[Origin, MutableMapping[str, str]], None]
"""Called with the origin and headers of a request; header names are lower-case."""

_callbacks: list[OnRequest] = []


def on_every_request(callback: OnRequest) -> None:
    """Registers a callback for requests of httpx, httpx2, aiohttp, requests, urllib3 and http.client. Idempotent.

    Exceptions of the callback propagate to the caller of the client.
    """
    if not _callbacks:
        for library in ("httpx", "httpx2"):
            wrapt.register_post_import_hook(_hook_httpx, library)
        wrapt.register_post_import_hook(_hook_aiohttp, "aiohttp")
        # requests uses urllib3; urllib uses http.client.
        wrapt.register_post_import_hook(_hook_urllib3, "urllib3.connectionpool")
        wrapt.wrap_function_wrapper(http.client, "HTTPConnection._send_request", _http_client)
    if callback not in _callbacks:
        _callbacks.append(callback)


def origin_of(url: str) -> Origin:
    """Returns the scheme, host and port of a URL."""
    parts = urlsplit(url)
    return _origin(parts.scheme, parts.hostname or "", parts.port)


def _show(origin: Origin, headers: MutableMapping[str, str]) -> None:
    for callback in _callbacks:
        callback(origin, headers)


def _hook_httpx(module: ModuleType) -> None:
    client = importlib.import_module(f"{module.__name__}._client")
    for name in ("Client.send", "AsyncClient.send"):
        wrapt.wrap_function_wrapper(client, name, _httpx)


def _httpx(wrapped: Callable[..., Any], _: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    request = args[0] if args else kwargs["request"]
    _show(_origin(request.url.scheme, request.url.host, request.url.port), request.headers)
    return wrapped(*args, **kwargs)


def _hook_aiohttp(module: ModuleType) -> None:
    requests = importlib.import_module(f"{module.__name__}.client_reqrep")
    wrapt.wrap_function_wrapper(requests, "ClientRequest.send", _aiohttp)


def _aiohttp(wrapped: Callable[..., Any], request: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    _show(_origin(request.url.scheme, request.url.host or "", request.url.port), request.headers)
    return wrapped(*args, **kwargs)


def _hook_urllib3(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "HTTPConnectionPool.urlopen", _urllib3)


def _urllib3(wrapped: Callable[..., Any], pool: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    def send(method: str, url: str, body: Any = None, headers: Any = None, *more: Any, **named: Any) -> Any:
        shown = _lower(pool.headers if headers is None else headers)
        _show(_origin(pool.scheme, pool.host, pool.port), shown)
        return wrapped(method, url, body, shown, *more, **named)

    return send(*args, **kwargs)


def _http_client(wrapped: Callable[..., Any], connection: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    def send(method: str, url: str, body: Any, headers: Mapping[str, str], *more: Any, **named: Any) -> Any:
        shown = _lower(headers)
        scheme = "https" if isinstance(connection, http.client.HTTPSConnection) else "http"
        _show(_origin(scheme, connection.host, connection.port), shown)
        return wrapped(method, url, body, shown, *more, **named)

    return send(*args, **kwargs)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {str(name).lower(): value for name, value in headers.items()}


def _origin(scheme: str, host: str, port: int | None) -> Origin:
    # urllib3 writes IPv6 addresses in brackets.
    return scheme, host.lower().strip("[]"), port if port is not None else _DEFAULT_PORTS.get(scheme)
