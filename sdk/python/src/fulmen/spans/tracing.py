"""The destination of spans from `fulmen.emit_*` and `fulmen.operation`: the current attempt.

Invariants: in a runner, spans go to the runner's tracing; in a process started by a runner, to the store, as set in its
environment; elsewhere to the program's own tracing, if any. Emitting never waits for delivery. The runner learns of
undelivered spans when the process exits, and the attempt is then incomplete.
"""

import atexit
import multiprocessing
import multiprocessing.util
import os
import threading
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from fulmen.agent import current
from fulmen.attempt_files import report_undelivered_spans
from fulmen.spans.attributes import ATTEMPT, ROLLOUT, SCOPE
from fulmen.spans.delivery import DeliveringProcessor

__all__ = ["flush", "parent_context", "tracer"]

FLUSH_S: Final = 30.0
"""Maximum wait for the spans at the exit of a process, in seconds."""

MAX_ATTRIBUTE_CHARS: Final = 32_768
LIMITS: Final = SpanLimits(
    max_span_attributes=128,
    max_span_attribute_length=MAX_ATTRIBUTE_CHARS,
    max_events=128,
    max_event_attributes=32,
    max_links=32,
    max_link_attributes=8,
)
"""Limits of a span; OpenTelemetry counts dropped items in the span."""

_OWNER: Final = "this process"
_NEEDED: Final = ("FULMEN_ROLLOUT", "FULMEN_ATTEMPT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def tracer() -> trace.Tracer:
    """Returns the tracer of the current attempt; outside an attempt, the program's own."""
    # Checked first: a runner's child has the environment of successive attempts, and must not set up tracing for one.
    if current() is not None and isinstance(trace.get_tracer_provider(), TracerProvider):
        return trace.get_tracer(SCOPE)
    own = _process.delivery()
    return trace.get_tracer(SCOPE) if own is None else own.tracer


def parent_context() -> otel_context.Context:
    """Returns the context of the open span; without an open span, the context of `TRACEPARENT`."""
    here = otel_context.get_current()
    if trace.get_current_span(here).get_span_context().is_valid:
        return here
    own = None if current() is not None else _process.delivery()
    parent = None if own is None else own.parent
    return here if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent), here)


def flush(timeout_s: float = FLUSH_S) -> int:
    """Waits until the spans of this process are acknowledged. Does nothing in a runner, which waits itself.

    Args:
        timeout_s: Maximum wait, in seconds.

    Returns:
        Number of unacknowledged spans, which may still arrive.
    """
    own = _process.delivery()
    return 0 if own is None else own.flush(timeout_s)


class _ProcessDelivery:
    """Tracing of a process that runs a single attempt."""

    def __init__(self) -> None:
        self._delivery = DeliveringProcessor(owner_of=lambda _: _OWNER, give_up_s=FLUSH_S)
        resource = Resource.create({ROLLOUT: os.environ["FULMEN_ROLLOUT"], ATTEMPT: os.environ["FULMEN_ATTEMPT"]})
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, span_limits=LIMITS, shutdown_on_exit=False)
        provider.add_span_processor(self._delivery)
        self.tracer = provider.get_tracer(SCOPE)
        self.parent = _parent(os.environ.get("TRACEPARENT", ""))
        # A separate thread: an export cannot be interrupted, and no thread can be started while a process exits.
        self._turn = threading.Condition()
        self._wanted = self._flushed = 0
        threading.Thread(target=self._send, name="fulmen spans", daemon=True).start()

    def flush(self, timeout_s: float) -> int:
        if self._delivery.undelivered(_OWNER):
            with self._turn:
                self._wanted += 1
                wanted = self._wanted
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._flushed >= wanted, timeout_s)
        return self._delivery.undelivered(_OWNER)

    def _send(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._wanted > self._flushed)
                wanted = self._wanted
            self._delivery.force_flush()
            with self._turn:
                self._flushed = wanted
                self._turn.notify_all()


class _ThisProcess:
    """Starts the tracing of this process at first use, and again after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delivery: _ProcessDelivery | None = None

    def delivery(self) -> _ProcessDelivery | None:
        """Returns the tracing; None unless a runner started this process for one attempt."""
        if not all(os.environ.get(name) for name in _NEEDED):
            return None
        with self._lock:
            if self._delivery is None:
                self._delivery = _ProcessDelivery()
                if multiprocessing.parent_process() is None:
                    atexit.register(self.end)
                else:
                    # These processes exit without atexit.
                    multiprocessing.util.Finalize(None, self.end, exitpriority=0)
            return self._delivery

    def forked(self) -> None:
        """Clears the parent's state after a fork."""
        self._lock = threading.Lock()
        self._delivery = None

    def end(self) -> None:
        """Waits for the spans and warns about lost ones."""
        report_undelivered_spans(0 if self._delivery is None else self._delivery.flush(FLUSH_S))


_process = _ThisProcess()
os.register_at_fork(after_in_child=_process.forked)


def _parent(traceparent: str) -> trace.SpanContext | None:
    try:
        _, trace_id, span_id, _ = traceparent.split("-")
        ids = int(trace_id, 16), int(span_id, 16)
    except ValueError:
        return None
    sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    parent = trace.SpanContext(trace_id=ids[0], span_id=ids[1], is_remote=True, trace_flags=sampled)
    return parent if parent.is_valid else None
