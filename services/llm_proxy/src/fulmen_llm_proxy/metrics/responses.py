"""Metrics of responses that the proxy stores."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

OUTCOMES = ("stored", "too_large", "failed")


class ResponseMetrics:
    """A counter of responses; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._responses = Counter(
            "fulmen_llm_proxy_stored_responses",
            "Responses of the Responses API that were to be stored, by outcome.",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self._responses.labels(outcome)

    def ended(self, outcome: str) -> None:
        """Counts a response, with one of `OUTCOMES`."""
        self._responses.labels(outcome).inc()
