"""What services did for a rollout, as one tree at the operator's collector.

No call goes through all services: a lease is streamed, a model call is the agent's, spans are stored in batches. So each
service puts its own spans where names alone say they belong: the trace is the rollout's id, a rollout or an attempt as a
whole has the span that `fulmen.ids` gives it. A backend gets its place from the proxy, as `traceparent`.

Nothing here is captured or trained on, and no content of an agent is in it: spans of agents go to the store.
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
    """Sends spans whose places are known beforehand; `keeps` tells whether a trace is sampled, for who adds much to it."""

    def __init__(self, *, resource: "Resource", sampler: "Sampler", processor: "SpanProcessor") -> None:
        """Takes what a tracer provider consists of.

        Args:
            resource: of the service.
            sampler: asked about the trace alone, so that all services with the same setting keep the same rollouts.
            processor: sends spans.
        """
        # Imported here: a service without a collector does without the SDK.
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._span = ReadableSpan
        self._scope = InstrumentationScope("fulmen")
        self._resource = resource
        self._sampler = sampler
        # Of a trace that is asked about several spans come, one right after the other.
        self.keeps = functools.lru_cache(maxsize=256)(self._keeps)
        self._processor = processor

    def _keeps(self, trace_id: str) -> bool:
        # Samplers of a ratio compare the lower half, and in ids of rollouts its first bits are always the same (RFC 9562, 4).
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
        """Adds a span that is over.

        Args:
            trace_id: 32 hexadecimal digits.
            start_ns: wall clock, nanoseconds since 1970.
            end_ns: likewise; 0: now.
            span_id: 16 hexadecimal digits; empty: any.
            parent_id: likewise; empty: it has none.
            calls_out: it is a call of another's service.
            error: what went wrong, in a word; empty if nothing did.
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
    """Returns where this service's spans go; None if no collector is set."""
    return _of_this_process


def set_own_traces(traces: OwnTraces | None) -> None:
    """Says where they go, once in a process."""
    global _of_this_process  # as OpenTelemetry keeps its providers
    _of_this_process = traces
