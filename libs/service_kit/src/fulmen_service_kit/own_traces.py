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
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.sampling import Sampler

_NAME_OF_ALL: Final = "fulmen.rollout"
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


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

    def add(
        self,
        name: str,
        *,
        trace_id: str,
        start_ns: int,
        end_ns: int = 0,
        span_id: str = "",
        parent_id: str = "",
        calls_out: bool = False,
        attributes: Mapping[str, str | int | float] | None = None,
        error: str = "",
    ) -> None:
        """Adds an ended span.

        Args:
            name: Name of the span.
            trace_id: Trace id, 32 hexadecimal digits.
            start_ns: Start, Unix nanoseconds.
            end_ns: End, Unix nanoseconds; 0 for now.
            span_id: Span id, 16 hexadecimal digits; empty for a random one.
            parent_id: Span id of the parent; empty for none.
            calls_out: Whether it is a call to another service.
            attributes: Attributes of the span.
            error: Error status; empty on success.
        """
        if not self.keeps(trace_id):
            return
        trace = int(trace_id, 16)
        kind = SpanKind.CLIENT if calls_out else SpanKind.INTERNAL
        own = int(span_id, 16) if span_id else random.getrandbits(64) or 1
        parent = SpanContext(trace, int(parent_id, 16), is_remote=True, trace_flags=_SAMPLED) if parent_id else None
        span = self._span(
            name,
            context=SpanContext(trace, own, is_remote=False, trace_flags=_SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=start_ns,
            end_time=end_ns or time.time_ns(),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


_of_this_process: OwnTraces | None = None


def own_traces() -> OwnTraces | None:
    """Returns the traces of this process; None without a collector."""
    return _of_this_process


def set_own_traces(traces: OwnTraces | None) -> None:
    """Sets the traces of this process."""
    global _of_this_process  # as OpenTelemetry's providers
    _of_this_process = traces
