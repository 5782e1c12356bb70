"""Operators' traces: the services' own spans of a rollout, as one tree at the collector.

No call passes through all services: leases are streamed, model calls come from agents, spans are stored in batches. So
trace and span ids are derived from names: the trace id is the rollout's id, and `fulmen.ids` defines the span ids of
rollouts and attempts. The proxy passes the context to backends as `traceparent`.

These spans contain no agent data and are never trained on; agents' spans go to the store.
"""

import functools
import hashlib
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.sampling import Sampler

_NAME_OF_ALL: Final = "fulmen.rollout"
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpan:
    """An ended span.

    Attributes:
        name: Name of the span.
        trace_id: Trace id, 32 hexadecimal digits.
        span_id: Span id, 16 hexadecimal digits; empty for a random one.
        parent_id: Span id of the parent; empty for none.
        start_ns: Start, Unix nanoseconds.
        end_ns: End, Unix nanoseconds; 0 for now.
        calls_out: Whether it is a call to another service.
        attributes: Attributes of the span.
        error: Error status; empty on success.
    """

    name: str
    trace_id: str
    span_id: str = ""
    parent_id: str = ""
    start_ns: int
    end_ns: int = 0
    calls_out: bool = False
    attributes: Mapping[str, str | int | float] | None = None
    error: str = ""


class OwnTraces:
    """Sends spans with given ids. `keeps` returns whether a trace is sampled."""

    def __init__(self, *, resource: "Resource", sampler: "Sampler", processor: "SpanProcessor") -> None:
        """Initializes the exporter of spans.

        Args:
            resource: Resource of the service.
            sampler: Samples by trace id alone, so that services with the same setting keep the same rollouts.
            processor: Sends spans.
        """
        # Deferred: a service without a collector does not need the SDK.
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._span = ReadableSpan
        self._scope = InstrumentationScope("fulmen")
        self._resource = resource
        self._sampler = sampler
        # Several spans of a trace are added in a row.
        self.keeps = functools.lru_cache(maxsize=256)(self._keeps)
        self._processor = processor

    def _keeps(self, trace_id: str) -> bool:
        # Ratio samplers compare the lower half, whose first bits are constant in UUIDs of rollouts (RFC 9562, 4).
        spread = int.from_bytes(hashlib.sha256(trace_id.encode()).digest()[:16])
        return self._sampler.should_sample(None, spread, _NAME_OF_ALL).decision.is_sampled()

    def add(self, span: OwnSpan) -> None:
        """Sends a span if its trace is sampled."""
        if not self.keeps(span.trace_id):
            return
        trace = int(span.trace_id, 16)
        own = int(span.span_id, 16) if span.span_id else random.getrandbits(64) or 1
        parent = int(span.parent_id, 16) if span.parent_id else 0
        readable = self._span(
            span.name,
            context=SpanContext(trace, own, is_remote=False, trace_flags=_SAMPLED),
            parent=SpanContext(trace, parent, is_remote=True, trace_flags=_SAMPLED) if parent else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind.CLIENT if span.calls_out else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns or time.time_ns(),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(readable)


_of_this_process: OwnTraces | None = None


def own_traces() -> OwnTraces | None:
    """Returns the traces of this process; None without a collector."""
    return _of_this_process


def set_own_traces(traces: OwnTraces | None) -> None:
    """Sets the traces of this process."""
    global _of_this_process  # as OpenTelemetry's providers
    _of_this_process = traces
