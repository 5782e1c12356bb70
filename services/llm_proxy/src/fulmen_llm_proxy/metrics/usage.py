"""Figures of limits and usage, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fulmen_llm_proxy.limits.usage_book import UsageBook

_MICROS = 1e6


class UsageMetrics(Collector):
    """Reads the book when it is asked, so that calls pay nothing for it."""

    def __init__(self, registry: CollectorRegistry, usage: UsageBook) -> None:
        """Takes the book of this process."""
        self._usage = usage
        self._refusals = Counter(
            "fulmen_llm_proxy_limit_refusals",
            "Calls that a limit refused, by the limit and the kind of thing that it is of.",
            ["limit", "of"],
            registry=registry,
        )
        registry.register(self)

    def refused(self, limit: str, of: str) -> None:
        """Counts a refusal."""
        self._refusals.labels(limit, of).inc()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Returns the cost since the process started, and what could not be counted by attempt."""
        yield CounterMetricFamily(
            "fulmen_llm_proxy_cost_dollars",
            "Cost of model calls by the price table.",
            value=self._usage.total.cost_micros / _MICROS,
        )
        yield CounterMetricFamily(
            "fulmen_llm_proxy_usage_without_attempt",
            "Calls of attempts that were counted for their project only, since too many attempts waited for the store.",
            value=self._usage.nameless,
        )
