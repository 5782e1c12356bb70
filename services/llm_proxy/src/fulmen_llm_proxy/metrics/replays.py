"""Metrics of attempts that continue where a lost one was."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter


class ReplayEnd(StrEnum):
    """Why calls of an attempt are no longer answered from captures.

    COMPLETE: all were given. DIVERGED: the agent made another call. NOTHING: nothing was captured. UNAVAILABLE: the store did not
    answer. NO_ROOM: the memory for captures was needed for other attempts.
    """

    COMPLETE = "complete"
    DIVERGED = "diverged"
    NOTHING = "nothing"
    UNAVAILABLE = "unavailable"
    NO_ROOM = "no_room"


class ReplayMetrics:
    """Counters; one object per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "fulmen_llm_proxy_replayed_calls", "Calls answered from captures of a lost attempt.", registry=registry
        )
        self._tokens = Counter(
            "fulmen_llm_proxy_replayed_tokens", "Completion tokens that were not sampled again.", registry=registry
        )
        self._ends = Counter(
            "fulmen_llm_proxy_replays",
            "Attempts that continued a lost one and now sample again, by reason for the end of the replay.",
            ["end"],
            registry=registry,
        )
        for end in ReplayEnd:
            self._ends.labels(end.value)

    def replayed(self, tokens: int) -> None:
        """Counts a call with its completion tokens."""
        self._calls.inc()
        self._tokens.inc(tokens)

    def ended(self, end: ReplayEnd) -> None:
        """Counts the end of a replay."""
        self._ends.labels(end.value).inc()
