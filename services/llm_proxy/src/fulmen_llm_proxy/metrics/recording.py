"""Metrics of recorded calls: how many reached the store, how many were dropped, and how many bytes wait."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

REASONS = ("buffer_full", "too_large", "redaction_timeout", "malformed", "stateful", "rejected")


class RecordingMetrics:
    """Counters and a gauge of recorded calls; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._recorded = Counter(
            "fulmen_llm_proxy_recorded_calls", "Calls of apps that the store has acknowledged.", registry=registry
        )
        self._dropped = Counter(
            "fulmen_llm_proxy_recorded_calls_dropped",
            "Calls of apps that should have been recorded but were not, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in REASONS:
            self._dropped.labels(reason)
        self.buffer_bytes = Gauge(
            "fulmen_llm_proxy_recording_buffer_bytes",
            "Memory of calls of apps that wait for delivery to the store, bytes.",
            registry=registry,
        )

    def delivered(self, calls: int) -> None:
        """Counts calls that the store has."""
        self._recorded.inc(calls)

    def dropped(self, reason: str, calls: int = 1) -> None:
        """Counts calls that are not recorded, for one of `REASONS`."""
        self._dropped.labels(reason).inc(calls)
