"""Suspends compression while gradients explode or vanish.

A norm is judged against the median and the median absolute deviation of the logarithms of earlier norms: norms spread
evenly on a logarithmic scale, and a few outliers move neither. Norms of 0 are ignored: with equal rewards, say, there is
nothing to learn, which says nothing about later rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from statistics import median

from fulmen_exchange.policies.decision import RoundStats
from fulmen_exchange.policies.settings import AnomalySettings
from fulmen_exchange.policies.state import dump, load

REMEMBERED = 64
LEAST = 20
"""Norms needed before any can be anomalous."""
MIN_DEVIATION = 0.1
"""Of logarithms. Without it, nearly constant norms would turn a difference of a few percent into an explosion."""


@dataclass(slots=True)
class AnomalyState:
    """Logarithms of recent norms, and round numbers."""

    logs: list[float] = field(default_factory=list)
    streak: int = 0
    streak_kind: str = ""
    off_until: int = 0
    quiet_until: int = 0


class AnomalyWatch:
    """Watches the largest gradient norm of the ranks.

    Anomalous norms are remembered too, so a lasting change becomes normal after half the window.
    """

    def __init__(self, settings: AnomalySettings) -> None:
        self._settings = settings
        self._state = AnomalyState()

    def off(self, stats: RoundStats) -> str | None:
        """Returns why compression is suspended in a round, or None."""
        state, settings = self._state, self._settings
        norm = max(stats.gradient_norms)
        kind = self._kind(norm) if norm else ""
        if not settings.window:
            return None
        if stats.number < state.off_until:
            state.streak = 0
            return f"gradients {state.streak_kind}; back on in round {state.off_until}"
        if not norm:
            return None
        state.streak = state.streak + 1 if kind and kind == state.streak_kind else int(bool(kind))
        state.streak_kind = kind
        if state.streak < settings.times or stats.number < state.quiet_until:
            return None
        # One more, for the round that flushes the residual.
        state.off_until = stats.number + settings.window + 1
        state.quiet_until = state.off_until + settings.cool_down
        state.streak = 0
        return f"gradients {kind} {settings.times} rounds in a row; back on in round {state.off_until}"

    def _kind(self, norm: float) -> str:
        """Returns "explode", "vanish" or "", and remembers the norm."""
        logs, value, found = self._state.logs, log(norm), ""
        if len(logs) >= LEAST:
            middle = median(logs)
            deviation = max(median(abs(each - middle) for each in logs), MIN_DEVIATION)
            if value > middle + self._settings.explodes_mads * deviation:
                found = "explode"
            elif value < middle + log(self._settings.vanishes_below):
                found = "vanish"
        logs.append(value)
        del logs[:-REMEMBERED]
        return found

    def state(self) -> dict[str, object]:
        """Returns the state as plain values."""
        return dump(self._state)

    def restore(self, plain: object) -> None:
        """Restores the state.

        Raises:
            PolicyStateInvalid: if it is not an anomaly state.
        """
        self._state = load(AnomalyState, plain)
