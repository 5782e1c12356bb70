"""Tracks which spans have been acknowledged by their receiver.

Invariant: a span counts as undelivered from its end until it is exported successfully. A span dropped by a full queue
or by an abandoned export counts as undelivered permanently.

Imports nothing of Fulmen: programs whose Python lacks it use this module, too.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

__all__ = ["MAX_QUEUED_SPANS", "DeliveringProcessor"]

MAX_QUEUED_SPANS: Final = 16_384
"""Maximum number of queued spans; beyond it the oldest are dropped and count as undelivered."""

MAX_SPANS_PER_EXPORT: Final = 512
"""Number of spans that the store packs into one chunk."""

SEND_AFTER_MS: Final = 1000.0
"""Maximum delay of a span before it is sent."""

OwnerOf = Callable[[ReadableSpan], str]


class _Ledger:
    """Counts undelivered spans by owner. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._undelivered: Counter[str] = Counter()

    def ended(self, owner: str) -> None:
        with self._lock:
            self._undelivered[owner] += 1

    def delivered(self, owners: Counter[str]) -> None:
        with self._lock:
            for owner, count in owners.items():
                if self._undelivered[owner] > count:
                    self._undelivered[owner] -= count
                else:
                    del self._undelivered[owner]

    def undelivered(self, owner: str) -> int:
        with self._lock:
            return self._undelivered.get(owner, 0)

    def forked(self) -> None:
        # At a fork, another thread may have held the lock.
        self._lock = threading.Lock()
        self._undelivered = Counter()

    def forget(self, owner: str) -> None:
        with self._lock:
            self._undelivered.pop(owner, None)


def _forked(ledger: _Ledger | None) -> None:
    """Clears the state in a forked process: the parent delivers its spans."""
    if ledger is not None:
        ledger.forked()


class _CountedExporter(SpanExporter):
    """Passes spans to an exporter and counts those delivered."""

    def __init__(self, exporter: SpanExporter, ledger: _Ledger, owner_of: OwnerOf) -> None:
        self._exporter = exporter
        self._ledger = ledger
        self._owner_of = owner_of

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._ledger.delivered(Counter(self._owner_of(span) for span in spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class DeliveringProcessor(SpanProcessor):
    """Sends spans in batches from a thread, and counts undelivered ones by owner.

    While the receiver is unavailable, retries with growing pauses for up to `give_up_s`.
    """

    def __init__(
        self,
        *,
        owner_of: OwnerOf,
        give_up_s: float,
        exporter: SpanExporter | None = None,
    ) -> None:
        """Starts the thread.

        Args:
            owner_of: Returns the owner of a span, such as an attempt's name.
            give_up_s: Maximum time for one batch, in seconds.
            exporter: Sends the spans; None for OTLP over gRPC, as set by `OTEL_EXPORTER_OTLP_ENDPOINT`.
        """
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(timeout=give_up_s)
        self._owner_of = owner_of
        self._ledger = _Ledger()
        ledger = weakref.ref(self._ledger)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: _forked(ledger()))
        self._batches = BatchSpanProcessor(
            _CountedExporter(exporter, self._ledger, owner_of),
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=MAX_SPANS_PER_EXPORT,
            schedule_delay_millis=SEND_AFTER_MS,
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span."""
        if span.context.trace_flags.sampled:
            self._ledger.ended(self._owner_of(span))
            self._batches.on_end(span)

    def undelivered(self, owner: str) -> int:
        """Returns the number of ended spans of an owner that are not acknowledged."""
        return self._ledger.undelivered(owner)

    def forget(self, owner: str) -> None:
        """Drops the count of an owner."""
        self._ledger.forget(owner)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Sends the queued spans; blocks without a timeout. See `undelivered` for the result."""
        return self._batches.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Sends the queued spans and stops."""
        self._batches.shutdown()
