"""Authenticates in-process agents' model calls with their attempt's key.

Invariant: a request to the model proxy inside an attempt carries that attempt's key and the current trace context,
whatever client sends it; one outside any attempt is rejected before it is sent. Requests to other origins are unchanged.
Clients created at import time are covered as well (`http_clients` lists the libraries).
"""

from collections.abc import MutableMapping

from fulmen.agent import NotInAttempt, acting_agent, current
from fulmen_runner.agents.tracing.http_clients import Origin, on_every_request, origin_of

AGENT_HEADER = "x-fulmen-agent"
"""Header with the name of the agent that makes a model call, in attempts with several."""

_origins: set[Origin] = set()


def attribute_model_calls(llm_proxy_url: str) -> None:
    """Authenticates requests to an origin. Hooks into HTTP clients once per process, now or when they are imported."""
    _origins.add(origin_of(llm_proxy_url))
    on_every_request(_on_request)


def current_traceparent() -> str:
    """Returns the W3C trace context of the current span; empty if there is no sampled one."""
    try:
        from opentelemetry import trace
    except ImportError:  # In the Python of an agent's own virtual environment.
        return ""
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
            "model call outside of an attempt. Call models from the agent's function, not while its module is imported."
        )
    key = context.environment["OPENAI_API_KEY"]
    # Anthropic's SDK sends x-api-key, all others a bearer token; never both.
    if "x-api-key" in headers:
        headers["x-api-key"] = key
        headers.pop("authorization", None)
    else:
        headers["authorization"] = f"Bearer {key}"
    headers.setdefault("traceparent", current_traceparent() or context.environment["TRACEPARENT"])
    if acting_agent():
        headers[AGENT_HEADER] = acting_agent()
