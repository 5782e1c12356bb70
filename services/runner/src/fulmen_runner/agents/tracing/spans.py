"""OpenTelemetry spans of in-process agents: each reaches the store as a span of the attempt that made it.

Invariant: a span that begins inside an attempt carries that attempt's names and goes to the store with the runner's
token; other spans of the process never do. An attempt is complete when the store has acknowledged its spans.
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

from fulmen.agent import current, current_step
from fulmen.attributes import ATTEMPT, ROLLOUT, STEP
from fulmen.span_delivery import DeliveringProcessor
from fulmen_runner.agents.tracing.current_spans import CurrentSpans
from fulmen_runner.agents.tracing.instrumentation import new_provider

_NAMES = (ROLLOUT, ATTEMPT)

MAX_OPEN_SPANS = 10_000
"""Of so many spans that have not ended the processor knows the names that they began with."""

_log = structlog.get_logger()


class AttemptSpanProcessor(SpanProcessor):
    """Names the attempt on its spans and hands those, and only those, on.

    A span belongs to the attempt of its parent, if that has one, else to the one that runs here: frameworks end up in
    threads and tasks that they began for another attempt, but they name the parent. What an agent writes over the names
    counts for nothing: the runner's token would carry it into another attempt.
    """

    def __init__(self, onward: SpanProcessor) -> None:
        self._onward = onward
        self._over = False
        self._names: OrderedDict[int, Mapping[str, str | int]] = OrderedDict()

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        """Writes the attempt's names on the span."""
        if self._over:
            # Nothing is taken out of a provider: what has ended must leave the spans of others alone.
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
        """Hands the span on, with the names that it began with."""
        if self._over:
            return
        context = span.get_span_context()
        named = self._names.pop(context.span_id, None) if context is not None else None
        if named is not None and named != dict(_names_of(span)):
            span = _renamed(span, named)
        if ROLLOUT in (span.attributes or {}):
            self._onward.on_end(span)

    def shutdown(self) -> None:
        """Sends what is left and ends."""
        self._over = True
        self._onward.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Sends what is left; blocks."""
        return self._onward.force_flush(timeout_millis)


class AttemptSpans:
    """The tracing of all in-process agents of a runner."""

    def __init__(self, exporter: SpanExporter, *, flush_s: float) -> None:
        """Adds itself to the process's tracer provider.

        Args:
            exporter: Sends spans to the store.
            flush_s: How long an attempt waits for its spans at its end, in seconds.
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
        """Returns how many spans of an attempt the store has not acknowledged, after waiting for them."""
        if not self._delivery.undelivered(attempt):
            return 0
        deadline = time.monotonic() + self._flush_s
        if self._flushing is not None:
            # That flush may have begun before this attempt's last span.
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
        """Shows every span of the process to a processor, once it has its attempt's names."""
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider)  # Made in the beginning, if there was none.
        provider.add_span_processor(processor)

    async def close(self) -> None:
        """Sends what is left and ends."""
        await asyncio.to_thread(self._processor.shutdown)


def add_span_processor(processor: SpanProcessor) -> None:
    """Adds a processor to the process's tracer provider, which is made if there is none yet."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = new_provider(shutdown_on_exit=False)
        trace.set_tracer_provider(provider)
    # Before the other: a span is named while its parent is still the current one.
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
    # Never detached: the context is the attempt's own and ends with it.
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
    """Returns the name of the attempt that a span carries."""
    attributes = span.attributes or {}
    return f"{attributes[ROLLOUT]!s}/attempts/{attributes[ATTEMPT]!s}"
