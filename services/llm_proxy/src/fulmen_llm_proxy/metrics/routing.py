"""Metrics of backends, retries and the answer cache."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fulmen_llm_proxy.routing.backend_state import UNKNOWN, BackendStates
from fulmen_llm_proxy.routing.breaker import BreakerState
from fulmen_llm_proxy.routing.table_holder import TableHolder


class RoutingMetrics(Collector):
    """Counts retries, fallbacks, hedges and cache lookups; reads the states of backends when scraped."""

    def __init__(self, registry: CollectorRegistry, states: BackendStates, tables: TableHolder) -> None:
        self._states = states
        self._tables = tables
        self._retries = Counter(
            "fulmen_llm_proxy_retries",
            "Retries of calls, by the failure of the previous try.",
            ["cause"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "fulmen_llm_proxy_fallbacks",
            "Tries on a fallback route, by the failure of the previous try.",
            ["cause"],
            registry=registry,
        )
        self._hedges = Counter(
            "fulmen_llm_proxy_hedges",
            "Calls hedged with a second backend; `won` if it answered first.",
            ["outcome"],
            registry=registry,
        )
        self._queue_refusals = Counter(
            "fulmen_llm_proxy_backend_queue_refusals",
            "Tries refused because a backend's queue was full or the wait was too long.",
            registry=registry,
        )
        self._cache = Counter(
            "fulmen_llm_proxy_cache_lookups", "Lookups in the answer cache.", ["outcome"], registry=registry
        )
        self._stale = Counter(
            "fulmen_llm_proxy_stale_answers",
            "Answers with an older policy version than the route assumes for their backend.",
            ["backend"],
            registry=registry,
        )
        self._steps_back = Counter(
            "fulmen_llm_proxy_lower_promotions",
            "Promotions of a lower policy version than the targets served, such as after a rollback.",
            registry=registry,
        )
        registry.register(self)

    def retried(self, cause: str) -> None:
        """Counts a retry, by the failure of the try before."""
        self._retries.labels(cause).inc()

    def fell_back(self, cause: str) -> None:
        """Counts a try on a fallback route."""
        self._fallbacks.labels(cause).inc()

    def hedged(self, outcome: str) -> None:
        """Counts a hedge: `won` if the second backend answered first, otherwise `lost`."""
        self._hedges.labels(outcome).inc()

    def queue_refused(self) -> None:
        """Counts a try for which the backend had no free slot in time."""
        self._queue_refusals.inc()

    def found_stale(self, backend_id: str) -> None:
        """Counts an answer with an older policy version than the route assumes for its backend."""
        self._stale.labels(backend_id).inc()

    def stepped_back(self) -> None:
        """Counts a promotion of a lower policy version than its targets served."""
        self._steps_back.inc()

    def looked_up(self, outcome: str) -> None:
        """Counts a cache lookup, `hit` or `miss`."""
        self._cache.labels(outcome).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the states of the backends and the number of unreadable resources."""
        yield GaugeMetricFamily(
            "fulmen_llm_proxy_unreadable_resources",
            "Routes and backends in the store that this proxy cannot read; their earlier versions remain in effect.",
            value=len(self._tables.current.unreadable),
        )
        breaker = GaugeMetricFamily(
            "fulmen_llm_proxy_backend_breaker",
            "State of a backend's circuit breaker: 1 for the current state.",
            labels=["backend", "state"],
        )
        in_flight = GaugeMetricFamily(
            "fulmen_llm_proxy_backend_in_flight", "Calls in flight at a backend.", labels=["backend"]
        )
        waiting = GaugeMetricFamily(
            "fulmen_llm_proxy_backend_waiting",
            "Calls waiting for a slot of a backend, for the end of its hold, or for their attempt's turn.",
            labels=["backend"],
        )
        attempts = GaugeMetricFamily(
            "fulmen_llm_proxy_backend_attempts",
            "Attempts that stay with a backend, including those that wait for their turn.",
            labels=["backend"],
        )
        engine = GaugeMetricFamily(
            "fulmen_llm_proxy_engine_waiting",
            "Requests waiting inside a backend's engine, as the engine reports.",
            labels=["backend"],
        )
        for backend_id, state in self._states.items():
            now = state.breaker.state
            for one in BreakerState:
                breaker.add_metric([backend_id, one], float(one is now))
            in_flight.add_metric([backend_id], state.in_flight)
            waiting.add_metric([backend_id], state.waiting)
            attempts.add_metric([backend_id], len(state.row.seats))
            if state.engine_waiting != UNKNOWN:
                engine.add_metric([backend_id], state.engine_waiting)
        yield from (breaker, in_flight, waiting, attempts, engine)
