"""The proxy's own figures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of the data plane and of the capture; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.calls = Counter(
            "fulmen_llm_proxy_calls", "Model calls that ended, by HTTP status.", ["status"], registry=registry
        )
        self.call_seconds = Histogram(
            "fulmen_llm_proxy_call_seconds",
            "Seconds from the request to the end of the answer.",
            registry=registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        self.first_byte_seconds = Histogram(
            "fulmen_llm_proxy_first_byte_seconds",
            "Seconds from the request to the first byte of the answer.",
            registry=registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        self.in_flight = Gauge("fulmen_llm_proxy_calls_in_flight", "Model calls that run now.", registry=registry)
        self.caller_gone = Counter(
            "fulmen_llm_proxy_callers_gone", "Calls whose caller left before the answer ended.", registry=registry
        )
        self.captured = Counter(
            "fulmen_llm_proxy_calls_captured", "Captured calls, by use for training.", ["usable"], registry=registry
        )
        self.capture_bytes = Gauge(
            "fulmen_llm_proxy_capture_queue_bytes", "Captures that wait for the store, in bytes.", registry=registry
        )
        self.rejected = Counter(
            "fulmen_llm_proxy_captures_rejected", "Captures that the store refused.", registry=registry
        )
