"""Prepares a process for in-process agents: environment, HTTP clients, threads, instrumentors."""

import os
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import structlog
import wrapt

from fulmen_runner.agents.environment import PLACEHOLDER_KEY, QUIET, Endpoints, network_environment
from fulmen_runner.agents.python.environment_view import show_attempts_environments
from fulmen_runner.agents.python.model_access import attribute_model_calls
from fulmen_runner.agents.python.threads import carry_context_into_threads
from fulmen_runner.agents.tracing.instrumentation import instrument

_HTTP_LIBRARIES = ("httpx", "httpx2")
_TRUST_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

_lock = threading.Lock()
_contexts: dict[tuple[object, ...], Any] = {}
_hooked: set[str] = set()
_log = structlog.get_logger()


def prepare_process(endpoints: Endpoints) -> None:
    """Prepares this process, a runner or its child. Idempotent."""
    os.environ.update(network_environment(endpoints))
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    os.environ.update(endpoints.environment(PLACEHOLDER_KEY))
    carry_context_into_threads()
    show_attempts_environments()
    share_tls_contexts()
    if endpoints.llm_proxy_url:
        attribute_model_calls(endpoints.llm_proxy_url)
    chosen = instrument(endpoints.instrument, _report)
    if chosen:
        _log.info("instrumentors_chosen", instrumentors=chosen)


def _report(instrumentor: str, reason: str) -> None:
    _log.warning("instrumentor_failed", instrumentor=instrumentor, reason=reason)


def share_tls_contexts() -> None:
    """Hooks into httpx and httpx2, now or when they are imported, to share one TLS context among all clients. Idempotent.

    Most agents create a client per attempt, which loads the trusted CAs each time: about 20 ms of CPU and 0.9 MB, even
    for plain HTTP. httpx recommends sharing a context.

    Invariant: only transports with httpx's defaults use the shared context; those with own certificates, an own context,
    no verification, or HTTP/2 (which writes its protocols into the context) are unchanged.
    """
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
