"""Makes spans current whose instrumentor does not, so that spans inside them become their children.

OpenInference's LangChain instrumentor is one: it observes runs by callbacks and avoids the risk of a context that is
never detached. Here, the previous context is stored in the new one, and an attempt's contexts end with it.

Invariant: spans may end in any order and in any context; the end of a span that is not current changes nothing.
"""

from __future__ import annotations

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

SCOPES_NOT_CURRENT = frozenset({"openinference.instrumentation.langchain"})
"""Instrumentation scopes that do not make their spans current."""

_BEFORE = otel_context.create_key("fulmen-before")


class CurrentSpans(SpanProcessor):
    """Makes spans of `SCOPES_NOT_CURRENT` current from their start to their end."""

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        """Makes the span current."""
        scope = span.instrumentation_scope
        if scope is not None and scope.name in SCOPES_NOT_CURRENT:
            before = otel_context.get_current()
            inner = trace.set_span_in_context(span, before)
            otel_context.attach(otel_context.set_value(_BEFORE, before, inner))

    def on_end(self, span: ReadableSpan) -> None:
        """Restores the previous context if the span is still current."""
        scope = span.instrumentation_scope
        if scope is None or scope.name not in SCOPES_NOT_CURRENT:
            return
        before = otel_context.get_value(_BEFORE)
        if isinstance(before, otel_context.Context) and trace.get_current_span().get_span_context() == span.context:
            otel_context.attach(before)
