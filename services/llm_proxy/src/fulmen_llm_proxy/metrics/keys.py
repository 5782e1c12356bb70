"""Metrics of keys: requests refused for their key, and calls ended with their attempt."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class KeyMetrics:
    """Counters of keys; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls_of_ended_attempts = Counter(
            "fulmen_llm_proxy_calls_of_ended_attempts",
            "Running calls ended because their attempt had ended.",
            registry=registry,
        )
        self.keys_refused = Counter(
            "fulmen_llm_proxy_keys_refused",
            "Keys refused: missing, forged, expired or revoked.",
            ["problem"],
            registry=registry,
        )
