"""Metrics of model calls, counted in plain numbers and converted when Prometheus scrapes.

A call costs one lookup and a few additions; the client library's counters would take a lock each. Everything runs in
the event loop's thread, scrapes included.

Invariant: label values come from the routing table, the APIs and the proxy itself, never from a caller's input.
Metrics of routes and backends that have left the routing table are removed with them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fulmen_llm_proxy.apis.errors import CALLER_GONE
from fulmen_llm_proxy.apis.usage import TokenCounts
from fulmen_llm_proxy.routing.table import Choice, RoutingTable
from fulmen_llm_proxy.routing.table_holder import TableHolder

_LATENCY_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_PLACE = ("model", "backend")
_KINDS = ("prompt", "cached", "completion")
_NOWHERE = ("", "")
"""Labels of calls that were never sent to a backend."""


class _Distribution:
    """Histogram counts by bound; the last count has the values above every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class _Counts:
    """The counts of one model at one backend."""

    __slots__ = ("cached", "call_s", "completion", "ended", "first_token_s", "gap_s", "prompt")

    def __init__(self) -> None:
        self.ended: dict[tuple[str, int], int] = {}
        self.call_s = _Distribution(_LATENCY_BOUNDS_S)
        self.first_token_s = _Distribution(_LATENCY_BOUNDS_S)
        self.gap_s = _Distribution(_GAP_BOUNDS_S)
        self.prompt = 0
        self.cached = 0
        self.completion = 0


class CallMetrics(Collector):
    """Counts calls; one object per process."""

    def __init__(self, registry: CollectorRegistry, tables: TableHolder) -> None:
        """Registers the collector and follows the routing tables, which name the models and policies to report."""
        self.in_flight = 0
        self._counts: dict[tuple[str, str], _Counts] = {}
        self._errors: dict[tuple[str, str], int] = {}
        self._tables = tables
        tables.follow(self._forget)
        registry.register(self)

    def failed(self, cause: str, status: int) -> None:
        """Counts an error of a call, or of a request that did not become one.

        Args:
            cause: code of the error, such as a reason of the error catalogue.
            status: status of the answer; 0 if the caller had disconnected.
        """
        error = (cause, _side_of(cause, status))
        self._errors[error] = self._errors.get(error, 0) + 1

    def ended(
        self,
        *,
        choice: Choice | None,
        api: str,
        status: int,
        elapsed_s: float,
        first_token_s: float | None,
        streamed: bool,
        used: TokenCounts,
    ) -> None:
        """Counts a finished call, its usage, and the mean gap between a stream's tokens, once per call."""
        place = _NOWHERE if choice is None else (choice.route.model, choice.backend.id)
        counts = self._counts.get(place)
        if counts is None:
            counts = self._counts[place] = _Counts()
        outcome = (api, status)
        counts.ended[outcome] = counts.ended.get(outcome, 0) + 1
        counts.call_s.add(elapsed_s)
        completion = used.completion or 0
        counts.prompt += used.prompt or 0
        counts.cached += used.cached
        counts.completion += completion
        if first_token_s is not None:
            counts.first_token_s.add(first_token_s)
            if streamed and completion > 1:
                counts.gap_s.add((elapsed_s - first_token_s) / (completion - 1))

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics."""
        yield GaugeMetricFamily(
            "fulmen_llm_proxy_calls_in_flight", "Model calls in flight.", value=float(self.in_flight)
        )
        calls = CounterMetricFamily(
            "fulmen_llm_proxy_calls", "Model calls finished.", labels=[*_PLACE, "api", "status"]
        )
        tokens = CounterMetricFamily(
            "fulmen_llm_proxy_tokens",
            "Tokens of calls, reported by backends or estimated; `prompt` includes `cached`.",
            labels=[*_PLACE, "kind"],
        )
        for place, counts in self._counts.items():
            for (api, status), count in counts.ended.items():
                calls.add_metric([*place, api, str(status)], count)
            for kind in _KINDS:
                tokens.add_metric([*place, kind], getattr(counts, kind))
        yield calls
        yield tokens
        yield from self._distributions()
        errors = CounterMetricFamily(
            "fulmen_llm_proxy_errors", "Errors by cause and responsible side.", labels=["cause", "side"]
        )
        for (cause, side), count in self._errors.items():
            errors.add_metric([cause, side], count)
        yield errors
        yield self._policy_versions()

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: there is nothing to collect at registration."""
        return ()

    def _distributions(self) -> Iterator[Metric]:
        found = {
            "call_s": HistogramMetricFamily(
                "fulmen_llm_proxy_call_seconds", "Time from the request to the end of the answer.", labels=_PLACE
            ),
            "first_token_s": HistogramMetricFamily(
                "fulmen_llm_proxy_first_token_seconds",
                "Time from the request to the first byte of the answer, or the first event of a stream.",
                labels=_PLACE,
            ),
            "gap_s": HistogramMetricFamily(
                "fulmen_llm_proxy_inter_token_seconds", "Mean time between the tokens of a stream.", labels=_PLACE
            ),
        }
        for place, counts in self._counts.items():
            for name, family in found.items():
                distribution: _Distribution = getattr(counts, name)
                family.add_metric(place, distribution.buckets(), distribution.total)
        yield from found.values()

    def _policy_versions(self) -> Metric:
        family = GaugeMetricFamily(
            "fulmen_llm_proxy_policy_version",
            "Latest policy version that a route serves.",
            labels=["policy", "model"],
        )
        newest: dict[tuple[str, str], int] = {}
        for route in self._tables.current.routes.values():
            for target in route.targets:
                if target.policy and (target.weight > 0 or len(route.targets) == 1):
                    key = (target.policy, route.model)
                    newest[key] = max(newest.get(key, 0), target.policy_version)
        for key, version in newest.items():
            family.add_metric(key, version)
        return family

    def _forget(self, table: RoutingTable) -> None:
        for model, backend_id in list(self._counts):
            gone = model not in table.routes or backend_id not in table.backends
            if gone and (model, backend_id) != _NOWHERE:
                del self._counts[model, backend_id]


def _side_of(cause: str, status: int) -> str:
    if cause == CALLER_GONE:
        return "caller"
    if cause.startswith("backend_"):
        return "backend"
    return "caller" if 400 <= status < 500 and status != 429 else "proxy"
