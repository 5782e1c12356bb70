"""Counts the spans of attempts for hooks."""

import threading
from collections import Counter

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from fulmen.agent import Context, entered
from fulmen.ids import parse_attempt_name
from fulmen.spans import attributes as names
from fulmen_runner.agents.environment import traceparent
from fulmen_runner.agents.tracing.spans import attempt_of
from fulmen_runner.attempts.hooks import HookFailure

MAX_NAMES = 200
OTHER = "other"
"""Name under which spans are counted beyond `MAX_NAMES`."""


class SpanCounts(SpanProcessor):
    """Counts ended spans of this process by attempt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}
        self._errors: Counter[str] = Counter()

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        """Does nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        """Counts a span; called from any thread."""
        # Hook failures are recorded by the runner, not the agent.
        if names.ROLLOUT not in (span.attributes or {}) or span.name == names.HOOK_SPAN:
            return
        attempt = attempt_of(span)
        with self._lock:
            counts = self._counts.get(attempt)
            if counts is not None:
                counts[span.name if span.name in counts or len(counts) < MAX_NAMES else OTHER] += 1
                self._errors[attempt] += span.status.status_code is trace.StatusCode.ERROR

    def begin(self, attempt: str) -> None:
        """Starts counting the spans of an attempt."""
        with self._lock:
            self._counts[attempt] = Counter()

    def finish(self, attempt: str) -> tuple[dict[str, int], int]:
        """Stops counting; returns the number of spans by name, and of those with an error."""
        with self._lock:
            return dict(self._counts.pop(attempt, {})), self._errors.pop(attempt, 0)

    def report(self, attempt: str, failure: HookFailure) -> None:
        """Adds a failed hook to the attempt's trace: a span with an event."""
        name = parse_attempt_name(attempt)
        _, trace_id, span_id, _ = traceparent(attempt).split("-")
        parent = trace.SpanContext(
            trace_id=int(trace_id, 16),
            span_id=int(span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        # Hooks run outside the attempt's context, from which a span takes its attempt.
        named = Context(rollout=name.rollout, attempt=attempt, attempt_number=name.number, mode="", deadline=0.0)
        with entered(named):
            span = trace.get_tracer(names.SCOPE).start_span(
                names.HOOK_SPAN,
                context=trace.set_span_in_context(trace.NonRecordingSpan(parent), otel_context.Context()),
                attributes={names.HOOK_NAME: failure.hook},
            )
        event = {names.HOOK_NAME: failure.hook, names.HOOK_POINT: failure.point, names.ERROR: failure.error}
        span.add_event(names.HOOK_FAILED_EVENT, event)
        span.set_status(trace.StatusCode.ERROR, failure.error)
        span.end()
