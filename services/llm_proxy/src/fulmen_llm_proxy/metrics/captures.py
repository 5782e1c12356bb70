"""Metrics of captures: how many are usable, dropped or on disk, and how many bytes wait."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class CaptureMetrics:
    """Counters and gauges of captures; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.captured = Counter(
            "fulmen_llm_proxy_calls_captured",
            "Captured calls, by usability for training.",
            ["usable"],
            registry=registry,
        )
        self.queue_bytes = Gauge(
            "fulmen_llm_proxy_capture_queue_bytes",
            "Memory of captures not yet acknowledged by the store, bytes.",
            registry=registry,
        )
        self.serves_alone = Gauge(
            "fulmen_llm_proxy_serves_alone",
            "1 if new attempts are answered even while the store is unavailable.",
            registry=registry,
        )
        self.captures_dropped = Counter(
            "fulmen_llm_proxy_captures_dropped",
            "Recorded calls that did not reach the store, by reason.",
            ["reason"],
            registry=registry,
        )
        self.captures_spooled = Counter(
            "fulmen_llm_proxy_captures_spooled", "Recorded calls written to the spool.", registry=registry
        )
        self.spool_bytes = Gauge("fulmen_llm_proxy_spool_bytes", "Size of the spool's files, bytes.", registry=registry)
        self.spool_records = Gauge(
            "fulmen_llm_proxy_spool_records", "Chunks of calls waiting in the spool.", registry=registry
        )
        self.spool_errors = Counter(
            "fulmen_llm_proxy_spool_errors", "I/O errors of the spool's disk.", registry=registry
        )

    def judged(self, *, usable: int, unusable: int) -> None:
        """Counts captured calls by usability for training."""
        self.captured.labels("yes").inc(usable)
        self.captured.labels("no").inc(unusable)

    def dropped(self, reason: str, calls: int) -> None:
        """Counts recorded calls that will not reach the store."""
        self.captures_dropped.labels(reason).inc(calls)

    def spooled(self, calls: int) -> None:
        """Counts calls written to the spool."""
        self.captures_spooled.inc(calls)

    def disk_failed(self) -> None:
        """Counts an I/O error of the spool's disk."""
        self.spool_errors.inc()
