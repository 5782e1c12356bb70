"""Shares one TLS context among the HTTP clients of in-process agents.

Most agents create a client per attempt, which loads the trusted CAs each time: about 20 ms of CPU and 0.9 MB, even for
plain HTTP. httpx recommends sharing a context.

Invariant: only transports with httpx's defaults use the shared context; those with own certificates, an own context, no
verification, or HTTP/2 (which writes its protocols into the context) are unchanged.
"""

import os
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import wrapt

_HTTP_LIBRARIES = ("httpx", "httpx2")
_TRUST_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

_lock = threading.Lock()
_contexts: dict[tuple[object, ...], Any] = {}
_hooked: set[str] = set()


def share_tls_contexts() -> None:
    """Hooks into httpx and httpx2, now or when they are imported. Idempotent."""
    for library in _HTTP_LIBRARIES:
        if library not in _hooked:
            _hooked.add(library)
            wrapt.register_post_import_hook(_hook, library)


def _hook(library: ModuleType) -> None:
    def made(wrapped: Callable[..., None], _: object, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        plain = not args and options.get("verify", True) is True
        if plain and not options.get("cert") and not options.get("http2"):
            options = {**options, "verify": _shared(library, trust_env=options.get("trust_env", True))}
        wrapped(*args, **options)

    for name in ("HTTPTransport.__init__", "AsyncHTTPTransport.__init__"):
        wrapt.wrap_function_wrapper(library, name, made)


def _shared(library: ModuleType, *, trust_env: bool) -> Any:
    trusted = tuple(os.environ.get(name) for name in _TRUST_VARIABLES) if trust_env else ()
    with _lock:
        key = (library.__name__, trust_env, *trusted)
        if key not in _contexts:
            _contexts[key] = library.create_ssl_context(trust_env=trust_env)
        return _contexts[key]
