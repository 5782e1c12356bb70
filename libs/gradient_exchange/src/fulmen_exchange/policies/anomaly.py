"""Gradients that explode or vanish: compression is left out for a window, and what was kept back is sent before it.

Whether a norm is out of the ordinary is told by the median of the logarithms of the norms before it and their median
absolute deviation: norms are spread about evenly on a logarithmic scale, and neither is moved by a few outliers. Norms
of 0 are no part of it: nothing was to be learnt there (all rewards were equal, say), which says nothing of what comes.
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
"""With fewer norms nothing is out of the ordinary."""
MIN_DEVIATION = 0.1
"""Of logarithms: norms that hardly differ would call a difference of some percent an explosion."""


@dataclass(slots=True)
class AnomalyState:
    """What is remembered: logarithms of norms, and rounds by number."""

    logs: list[float] = field(default_factory=list)
    streak: int = 0
    streak_kind: str = ""
    off_until: int = 0
    quiet_until: int = 0


class AnomalyWatch:
    """Watches the largest gradient norm of the ranks.

    Norms out of the ordinary are remembered too: what lasts longer than half of what is remembered is ordinary then.
    """

    def __init__(self, settings: AnomalySettings) -> None:
        self._settings = settings
        self._state = AnomalyState()

    def off(self, stats: RoundStats) -> str | None:
        """Takes a round's norms in; returns why compression is to be off, or None if it is not to be."""
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
        # One more, for the round that sends what was kept back.
        state.off_until = stats.number + settings.window + 1
        state.quiet_until = state.off_until + settings.cool_down
        state.streak = 0
        return f"gradients {kind} {settings.times} rounds in a row; back on in round {state.off_until}"

    def _kind(self, norm: float) -> str:
        """Says what a norm does, and remembers it; empty for nothing."""
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
        """Returns what is remembered, as plain values."""
        return dump(self._state)

    def restore(self, plain: object) -> None:
        """Goes on from it.

        Raises:
            PolicyStateInvalid: if it is none.
        """
        self._state = load(AnomalyState, plain)
