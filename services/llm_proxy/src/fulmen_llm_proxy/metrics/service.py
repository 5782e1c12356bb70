"""The proxy's own figures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from fulmen_llm_proxy.metrics.calls import CallMetrics


class Metrics:
    """Counters of the data plane and of the capture; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.calls = CallMetrics(registry)
        self.calls_of_ended_attempts = Counter(
            "fulmen_llm_proxy_calls_of_ended_attempts",
            "Running calls that were ended because their attempt was.",
            registry=registry,
        )
        self.keys_refused = Counter(
            "fulmen_llm_proxy_keys_refused",
            "Keys that were refused: missing, forged, expired or revoked.",
            ["problem"],
            registry=registry,
        )
        self.captured = Counter(
            "fulmen_llm_proxy_calls_captured", "Captured calls, by use for training.", ["usable"], registry=registry
        )
        self.capture_bytes = Gauge(
            "fulmen_llm_proxy_capture_queue_bytes", "Captures that wait for the store, in bytes.", registry=registry
        )
        self.capture_dropped = Counter(
            "fulmen_llm_proxy_captures_dropped",
            "Recorded calls that did not reach the store, by reason.",
            ["reason"],
            registry=registry,
        )
        self.capture_spooled = Counter(
            "fulmen_llm_proxy_captures_spooled", "Recorded calls that were written to the spool.", registry=registry
        )
        self.spool_bytes = Gauge("fulmen_llm_proxy_spool_bytes", "Bytes of the spool's files.", registry=registry)
        self.spool_records = Gauge(
            "fulmen_llm_proxy_spool_records", "Chunks of calls that wait in the spool.", registry=registry
        )
        self.spool_errors = Counter("fulmen_llm_proxy_spool_errors", "Errors of the spool's disk.", registry=registry)

    def judged(self, *, usable: int, unusable: int) -> None:
        """Counts captured calls by their use for training."""
        self.captured.labels("yes").inc(usable)
        self.captured.labels("no").inc(unusable)

    def dropped(self, reason: str, calls: int) -> None:
        """Counts recorded calls that will not reach the store."""
        self.capture_dropped.labels(reason).inc(calls)

    def spooled(self, calls: int) -> None:
        """Counts calls that were written to the spool."""
        self.capture_spooled.inc(calls)

    def disk_failed(self) -> None:
        """Counts an error of the spool's disk."""
        self.spool_errors.inc()
