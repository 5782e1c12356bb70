"""Makes spans current whose instrumentor leaves that out, so that what happens within them becomes their child.

OpenInference's instrumentor of LangChain is one: it learns of a run's beginning and end by callbacks, and spares itself
the risk that a context is never left again. Here that costs nothing: what was current before is kept in the context
itself, and an attempt's contexts end with it.

Invariant: ends are harmless in any order and in any context; one that is not the innermost changes nothing.
"""

from __future__ import annotations

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

SCOPES_NOT_CURRENT = frozenset({"openinference.instrumentation.langchain"})
"""Instrumentation scopes whose spans are never current by themselves."""

_BEFORE = otel_context.create_key("fulmen-before")


class CurrentSpans(SpanProcessor):
    """Makes spans of `SCOPES_NOT_CURRENT` current where they begin, until they end there."""

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        """Makes the span current."""
        scope = span.instrumentation_scope
        if scope is not None and scope.name in SCOPES_NOT_CURRENT:
            before = otel_context.get_current()
            inner = trace.set_span_in_context(span, before)
            otel_context.attach(otel_context.set_value(_BEFORE, before, inner))

    def on_end(self, span: ReadableSpan) -> None:
        """Makes current again what was so before, if the span still is."""
        scope = span.instrumentation_scope
        if scope is None or scope.name not in SCOPES_NOT_CURRENT:
            return
        before = otel_context.get_value(_BEFORE)
        if isinstance(before, otel_context.Context) and trace.get_current_span().get_span_context() == span.context:
            otel_context.attach(before)
