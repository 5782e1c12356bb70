"""OpenTelemetry spans of in-process agents: each reaches the store as a span of the attempt that made it.

Invariant: a span that begins inside an attempt carries that attempt's names and goes to the store with the runner's
token; other spans of the process never do. An attempt ends after its spans were sent.
"""

import asyncio
import threading
from collections import Counter

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from fulmen.agent import current

ROLLOUT_ATTRIBUTE = "fulmen.rollout"
ATTEMPT_ATTRIBUTE = "fulmen.attempt"
FLUSH_DEADLINE_S = 10.0

_log = structlog.get_logger()


class AttemptSpanProcessor(SpanProcessor):
    """Names the attempt on its spans and hands those, and only those, on."""

    def __init__(self, onward: SpanProcessor) -> None:
        self._onward = onward
        self._lock = threading.Lock()
        self._unsent: Counter[str] = Counter()

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        """Writes the attempt's names on the span."""
        attempt = current()
        if attempt is not None:
            span.set_attribute(ROLLOUT_ATTRIBUTE, attempt.rollout)
            span.set_attribute(ATTEMPT_ATTRIBUTE, attempt.attempt_number)

    def on_end(self, span: ReadableSpan) -> None:
        """Hands the span on."""
        attributes = span.attributes or {}
        if ROLLOUT_ATTRIBUTE in attributes:
            # Agents end spans in threads of their own, too.
            with self._lock:
                self._unsent[f"{attributes[ROLLOUT_ATTRIBUTE]!s}/attempts/{attributes[ATTEMPT_ATTRIBUTE]!s}"] += 1
            self._onward.on_end(span)

    def take_unsent(self, attempt: str) -> int:
        """Returns how many spans of an attempt ended since this was last asked."""
        with self._lock:
            return self._unsent.pop(attempt, 0)

    def shutdown(self) -> None:
        """Sends what is left and ends."""
        self._onward.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Sends what is left; blocks."""
        return self._onward.force_flush(timeout_millis)


class AttemptSpans:
    """The tracing of all in-process agents of a runner."""

    def __init__(self, *, otlp_url: str, token: str) -> None:
        headers = (("authorization", f"Bearer {token}"),)
        insecure = not otlp_url.startswith("https:")
        exporter = OTLPSpanExporter(endpoint=otlp_url, insecure=insecure, headers=headers)
        self._processor = AttemptSpanProcessor(BatchSpanProcessor(exporter))
        self._flushing: asyncio.Task[bool] | None = None
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = TracerProvider(shutdown_on_exit=False)
            trace.set_tracer_provider(provider)
        provider.add_span_processor(self._processor)

    def enter(self, traceparent: str) -> None:
        """Makes the attempt's trace the parent of spans in this context."""
        _, trace_id, span_id, _ = traceparent.split("-")
        parent = trace.SpanContext(
            trace_id=int(trace_id, 16),
            span_id=int(span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        # Never detached: the context is the attempt's own and ends with it.
        otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))

    async def flush(self, attempt: str) -> None:
        """Returns when the spans that an attempt made were sent, at most `FLUSH_DEADLINE_S` later."""
        if not self._processor.take_unsent(attempt):
            return
        if self._flushing is not None:
            # That flush may have begun before this attempt's last span.
            await asyncio.wait((self._flushing,), timeout=FLUSH_DEADLINE_S)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(
                asyncio.to_thread(self._processor.force_flush, int(FLUSH_DEADLINE_S * 1000)), name="flush spans"
            )
        done, _ = await asyncio.wait((self._flushing,), timeout=FLUSH_DEADLINE_S)
        if not done or not self._flushing.result():
            _log.warning("spans_not_sent", attempt=attempt)

    async def close(self) -> None:
        """Sends what is left and ends."""
        await asyncio.to_thread(self._processor.shutdown)
