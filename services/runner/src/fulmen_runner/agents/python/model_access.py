"""Gives in-process agents' model calls the key of the attempt that makes them.

Invariant: a request to the model proxy from inside an attempt carries that attempt's key and the innermost span's trace
context, whatever client it comes from; one from outside of any attempt is refused before it leaves. Requests to other
origins are untouched. Works for clients that were built at import time (`http_clients` names the libraries).
"""

from collections.abc import MutableMapping

from opentelemetry import trace

from fulmen.agent import NotInAttempt, acting_agent, current
from fulmen_runner.agents.tracing.http_clients import Origin, on_every_request, origin_of

AGENT_HEADER = "x-fulmen-agent"
"""Which agent makes a model call, where an attempt has several."""

_origins: set[Origin] = set()


def attribute_model_calls(llm_proxy_url: str) -> None:
    """Hooks into HTTP clients, now or when an agent imports them. Adds an origin; hooks once for a process."""
    _origins.add(origin_of(llm_proxy_url))
    on_every_request(_on_request)


def current_traceparent() -> str:
    """Returns the W3C trace context of the current span; empty if there is none that is sent."""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid or not span.trace_flags.sampled:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _on_request(origin: Origin, headers: MutableMapping[str, str]) -> None:
    if origin in _origins:
        _attribute(headers)


def _attribute(headers: MutableMapping[str, str]) -> None:
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
    headers.setdefault("traceparent", current_traceparent() or context.environment["TRACEPARENT"])
    if acting_agent():
        headers[AGENT_HEADER] = acting_agent()
