"""Metrics of the answer cache that proxies share."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

OUTCOMES = ("hit", "miss", "failed", "unreadable", "stored", "not_stored")


class SharedAnswerMetrics:
    """A counter; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._operations = Counter(
            "fulmen_llm_proxy_shared_cache",
            "Lookups and writes of the answer cache that proxies share, by outcome.",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self._operations.labels(outcome)

    def ended(self, outcome: str) -> None:
        """Counts a lookup or a write, with one of `OUTCOMES`."""
        self._operations.labels(outcome).inc()
