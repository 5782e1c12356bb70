"""Metrics of limits, usage and cost."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fulmen_llm_proxy.limits.usage_book import UsageBook

_MICROS = 1e6


class UsageMetrics(Collector):
    """Reads the usage book when scraped, at no cost for calls."""

    def __init__(self, registry: CollectorRegistry, usage: UsageBook) -> None:
        self._usage = usage
        self._refusals = Counter(
            "fulmen_llm_proxy_limit_refusals",
            "Calls refused by a limit, by limit and subject.",
            ["limit", "of"],
            registry=registry,
        )
        registry.register(self)

    def refused(self, limit: str, of: str) -> None:
        """Counts a refusal by a limit of a project, attempt or backend."""
        self._refusals.labels(limit, of).inc()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the cost since the process started, and the calls counted without their attempt."""
        yield CounterMetricFamily(
            "fulmen_llm_proxy_cost_dollars",
            "Cost of model calls by the price table, US dollars.",
            value=self._usage.total.cost_micros / _MICROS,
        )
        yield CounterMetricFamily(
            "fulmen_llm_proxy_usage_without_attempt",
            "Calls counted for their project only, because the usage of too many attempts was unreported.",
            value=self._usage.without_attempt,
        )
