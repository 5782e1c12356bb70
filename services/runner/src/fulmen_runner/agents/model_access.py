"""Gives in-process agents' model calls the key of the attempt that makes them.

Invariant: a request to the model proxy through httpx, from inside an attempt, carries that attempt's key and trace
context whatever client it comes from; one from outside of any attempt is refused before it leaves. Requests to other
origins are untouched. Works for clients that were built at import time, by any SDK on httpx or httpx2.
"""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import wrapt

from fulmen.agent import NotInAttempt, acting_agent, current

_HTTP_LIBRARIES = ("httpx", "httpx2")
AGENT_HEADER = "x-fulmen-agent"
"""Which agent makes a model call, where an attempt has several."""

_DEFAULT_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int | None]

_origins: set[Origin] = set()
_hooked: set[str] = set()


def attribute_model_calls(llm_proxy_url: str) -> None:
    """Hooks into httpx and httpx2, now or when an agent imports them. Adds an origin; hooks once for a process."""
    url = urlsplit(llm_proxy_url)
    _origins.add(_origin(url.scheme, url.hostname or "", url.port))
    for library in _HTTP_LIBRARIES:
        if library not in _hooked:
            _hooked.add(library)
            wrapt.register_post_import_hook(_hook, library)


def _hook(module: ModuleType) -> None:
    client = importlib.import_module(f"{module.__name__}._client")
    for name in ("Client.send", "AsyncClient.send"):
        wrapt.wrap_function_wrapper(client, name, _send)


def _send(wrapped: Callable[..., Any], _: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    request = args[0] if args else kwargs["request"]
    if _origin(request.url.scheme, request.url.host, request.url.port) in _origins:
        _attribute(request.headers)
    return wrapped(*args, **kwargs)


def _attribute(headers: Any) -> None:
    context = current()
    if context is None:
        raise NotInAttempt(
            "A model call was made outside of an attempt: the proxy could not tell whose it is. Call models from the "
            "agent's function, not while its module is imported."
        )
    key = context.environment["OPENAI_API_KEY"]
    # Anthropic's SDK sends x-api-key, all others a bearer token; nothing else of the two may go out.
    if "x-api-key" in headers:
        headers["x-api-key"] = key
        headers.pop("authorization", None)
    else:
        headers["authorization"] = f"Bearer {key}"
    headers.setdefault("traceparent", context.environment["TRACEPARENT"])
    if acting_agent():
        headers[AGENT_HEADER] = acting_agent()


def _origin(scheme: str, host: str, port: int | None) -> Origin:
    return scheme, host.lower(), port if port is not None else _DEFAULT_PORTS.get(scheme)
