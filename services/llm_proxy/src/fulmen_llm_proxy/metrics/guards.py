"""Metrics of guards."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class GuardMetrics:
    """Counts the verdicts of guards."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._checks = Counter(
            "fulmen_llm_proxy_guard_checks",
            "Checks by guards, by guard, phase and outcome.",
            ["guard", "phase", "outcome"],
            registry=registry,
        )

    def asked(self, guard: str, phase: str, outcome: str) -> None:
        """Counts a question: `allowed`, `refused` or `failed`."""
        self._checks.labels(guard, phase, outcome).inc()
