"""OpenTelemetry spans of in-process agents, delivered to the store as spans of their attempt.

Invariant: a span started inside an attempt carries that attempt's names and is sent with the runner's token; other spans
of the process are never sent. An attempt is complete when the store has acknowledged its spans.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from fulmen import ids
from fulmen.agent import current, current_step
from fulmen.spans.attributes import ATTEMPT, ROLLOUT, STEP
from fulmen.spans.delivery import DeliveringProcessor
from fulmen_runner.agents.tracing.current_spans import CurrentSpans
from fulmen_runner.agents.tracing.instrumentation import new_provider

_NAMES = (ROLLOUT, ATTEMPT)

MAX_OPEN_SPANS = 10_000
"""Number of open spans whose names the processor remembers."""

_log = structlog.get_logger()


class AttemptSpanProcessor(SpanProcessor):
    """Adds the attempt's names to its spans, and forwards only those.

    A span belongs to its parent's attempt, or without one to the current attempt: frameworks reuse threads and tasks
    that they started for another attempt, but they set the parent. Names overwritten by an agent are restored, since
    with the runner's token the span could enter another attempt.
    """

    def __init__(self, onward: SpanProcessor) -> None:
        self._onward = onward
        self._over = False
        self._names: OrderedDict[int, Mapping[str, str | int]] = OrderedDict()

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        """Adds the attempt's names to the span."""
        if self._over:
            # A provider cannot remove processors.
            return
        attempt = current()
        parent = trace.get_current_span(parent_context)
        named = dict(self._names.get(parent.get_span_context().span_id) or _names_of(parent))
        if not named and attempt is not None:
            named = {ROLLOUT: attempt.rollout, ATTEMPT: attempt.attempt_number}
        span.set_attributes(named)
        self._names[span.get_span_context().span_id] = named
        if len(self._names) > MAX_OPEN_SPANS:
            self._names.popitem(last=False)
        step = current_step()
        if step is not None and attempt is not None and named.get(ROLLOUT) == attempt.rollout:
            span.set_attribute(STEP, step)

    def on_end(self, span: ReadableSpan) -> None:
        """Forwards the span with its original names."""
        if self._over:
            return
        context = span.get_span_context()
        named = self._names.pop(context.span_id, None) if context is not None else None
        if named is not None and named != dict(_names_of(span)):
            span = _renamed(span, named)
        if ROLLOUT in (span.attributes or {}):
            self._onward.on_end(span)

    def shutdown(self) -> None:
        """Flushes and stops."""
        self._over = True
        self._onward.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flushes; blocks."""
        return self._onward.force_flush(timeout_millis)


class AttemptSpans:
    """Tracing of all in-process agents of a runner."""

    def __init__(self, exporter: SpanExporter, *, flush_s: float) -> None:
        """Registers with the process's tracer provider.

        Args:
            exporter: Sends spans to the store.
            flush_s: Timeout for flushing an attempt's spans, in seconds.
        """
        self._delivery = DeliveringProcessor(owner_of=attempt_of, give_up_s=flush_s, exporter=exporter)
        self._processor = AttemptSpanProcessor(self._delivery)
        self._flush_s = flush_s
        self._flushing: asyncio.Task[bool] | None = None
        add_span_processor(self._processor)

    def enter(self, traceparent: str) -> None:
        """Makes the attempt's trace the parent of spans in this context."""
        enter_trace(traceparent)

    async def flush(self, attempt: str) -> int:
        """Flushes an attempt's spans; returns the number that the store has not acknowledged."""
        if not self._delivery.undelivered(attempt):
            return 0
        deadline = time.monotonic() + self._flush_s
        if self._flushing is not None:
            # The running flush may have started before this attempt's last span.
            await asyncio.wait((self._flushing,), timeout=self._flush_s)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(asyncio.to_thread(self._processor.force_flush), name="flush spans")
        await asyncio.wait((self._flushing,), timeout=max(0.0, deadline - time.monotonic()))
        undelivered = self._delivery.undelivered(attempt)
        self._delivery.forget(attempt)
        if undelivered:
            _log.warning("spans_not_acknowledged", attempt=attempt, count=undelivered)
        return undelivered

    def add_processor(self, processor: SpanProcessor) -> None:
        """Adds a processor that sees every span of the process after its attempt's names were added."""
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider)  # Set by the constructor.
        provider.add_span_processor(processor)

    async def close(self) -> None:
        """Flushes and stops."""
        await asyncio.to_thread(self._processor.shutdown)


def add_span_processor(processor: SpanProcessor) -> None:
    """Adds a processor to the process's tracer provider, creating the provider if needed."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = new_provider(shutdown_on_exit=False)
        trace.set_tracer_provider(provider)
    # First: a span gets its names while its parent is still current.
    provider.add_span_processor(processor)
    provider.add_span_processor(CurrentSpans())


def enter_trace(traceparent: str) -> None:
    """Makes an attempt's trace the parent of spans in this context."""
    _, trace_id, span_id, _ = traceparent.split("-")
    parent = trace.SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    # Never detached: the context ends with the attempt.
    otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))


def _renamed(span: ReadableSpan, names: Mapping[str, str | int]) -> ReadableSpan:
    others = {key: value for key, value in (span.attributes or {}).items() if key not in _NAMES}
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes={**others, **names},
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _names_of(span: trace.Span | ReadableSpan) -> Iterator[tuple[str, str | int]]:
    attributes: Mapping[str, object] = getattr(span, "attributes", None) or {}
    for name in _NAMES:
        value = attributes.get(name)
        if isinstance(value, (str, int)):
            yield name, value


def attempt_of(span: ReadableSpan) -> str:
    """Returns the name of a span's attempt."""
    attributes = span.attributes or {}
    return ids.attempt_of(str(attributes[ROLLOUT]), str(attributes[ATTEMPT]))
