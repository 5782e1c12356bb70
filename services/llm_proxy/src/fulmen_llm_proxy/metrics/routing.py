"""Figures of backends, tries and the answer cache, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fulmen_llm_proxy.routing.backend_state import UNKNOWN, BackendStates
from fulmen_llm_proxy.routing.breaker import BreakerState


class RoutingMetrics(Collector):
    """Counts what is out of the ordinary; reads the backends' states when it is asked."""

    def __init__(self, registry: CollectorRegistry, states: BackendStates) -> None:
        """Takes the states of this process."""
        self._states = states
        self._retries = Counter(
            "fulmen_llm_proxy_retries",
            "Further tries of calls, by what was wrong with the one before.",
            ["cause"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "fulmen_llm_proxy_fallbacks",
            "Tries on a fallback route, by what was wrong with the one before.",
            ["cause"],
            registry=registry,
        )
        self._hedges = Counter(
            "fulmen_llm_proxy_hedges",
            "Calls for which a second backend was asked: `won` if that one answered first.",
            ["outcome"],
            registry=registry,
        )
        self._queue_refusals = Counter(
            "fulmen_llm_proxy_backend_queue_refusals",
            "Tries that found no place in a backend's queue, or waited too long in it.",
            registry=registry,
        )
        self._cache = Counter(
            "fulmen_llm_proxy_cache_lookups", "Lookups in the answer cache.", ["outcome"], registry=registry
        )
        registry.register(self)

    def retried(self, cause: str) -> None:
        """Counts a further try."""
        self._retries.labels(cause).inc()

    def fell_back(self, cause: str) -> None:
        """Counts a try on a fallback route."""
        self._fallbacks.labels(cause).inc()

    def hedged(self, outcome: str) -> None:
        """Counts a hedge."""
        self._hedges.labels(outcome).inc()

    def queue_refused(self) -> None:
        """Counts a try without a place."""
        self._queue_refusals.inc()

    def looked_up(self, outcome: str) -> None:
        """Counts a lookup, `hit` or `miss`."""
        self._cache.labels(outcome).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Returns the backends' states."""
        breaker = GaugeMetricFamily(
            "fulmen_llm_proxy_backend_breaker",
            "1 for the state that a backend's circuit breaker is in.",
            labels=["backend", "state"],
        )
        in_flight = GaugeMetricFamily(
            "fulmen_llm_proxy_backend_in_flight", "Calls under way at a backend.", labels=["backend"]
        )
        waiting = GaugeMetricFamily(
            "fulmen_llm_proxy_backend_waiting",
            "Calls that wait for a place at a backend, or for the end of its hold.",
            labels=["backend"],
        )
        engine = GaugeMetricFamily(
            "fulmen_llm_proxy_engine_waiting",
            "Requests that wait within a backend's engine, as it says itself.",
            labels=["backend"],
        )
        for backend_id, state in self._states.items():
            now = state.breaker.state
            for one in BreakerState:
                breaker.add_metric([backend_id, one], float(one is now))
            in_flight.add_metric([backend_id], state.in_flight)
            waiting.add_metric([backend_id], state.waiting)
            if state.engine_waiting != UNKNOWN:
                engine.add_metric([backend_id], state.engine_waiting)
        yield from (breaker, in_flight, waiting, engine)
