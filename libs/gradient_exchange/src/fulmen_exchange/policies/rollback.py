"""Returns to earlier codec settings when the reward falls under newer ones.

The good settings are those in effect when the smoothed metric was at its best. They are held for a cool-down, which each
further rollback doubles. If the metric has not recovered by then, the settings were not the cause: the best value is
forgotten and the policy continues.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fulmen_exchange.policies.decision import CodecChoice, Proposal, RoundStats
from fulmen_exchange.policies.settings import NoRollback, RollbackOnDrop
from fulmen_exchange.policies.state import dump, load

MAX_DOUBLINGS = 6


@dataclass(slots=True)
class RollbackState:
    """The metric's mean and best value, and the good and held choices."""

    mean: float | None = None
    best: float | None = None
    good: CodecChoice | None = None
    below: int = 0
    held: CodecChoice | None = None
    held_until: int = 0
    times: int = 0


class Rollback:
    """Overrides proposals while good settings are held."""

    def __init__(self, settings: NoRollback | RollbackOnDrop) -> None:
        self._settings = settings
        self._state = RollbackState()

    def guard(self, stats: RoundStats, wanted: Proposal, *, now: CodecChoice | None) -> Proposal:
        """Returns the proposal to follow.

        Args:
            stats: Statistics of the round; the metric belongs to `now`.
            wanted: What the chooser proposes.
            now: The codec in effect; None without compression.
        """
        settings, state = self._settings, self._state
        if isinstance(settings, NoRollback):
            return wanted
        if stats.metric is not None and now is not None:
            self._learn(stats.metric, now, settings)
        events = list(wanted.events)
        if state.held is not None:
            if stats.number < state.held_until:
                return replace(wanted, choice=state.held, reason=f"rolled back until round {state.held_until}")
            events += self._end(settings)
        if state.below < settings.window or state.good is None or now is None or now == state.good:
            return replace(wanted, events=tuple(events))
        rounds = settings.cool_down * 2 ** min(state.times, MAX_DOUBLINGS)
        state.held, state.held_until, state.below = state.good, stats.number + rounds, 0
        state.times += 1
        events.append(
            f"compression rolled back from {now.text} to {state.held.text}: the metric fell from {state.best:.4g} to"
            f" {state.mean:.4g}, by more than {settings.drop:.4g}; held for {rounds} rounds"
        )
        return replace(wanted, choice=state.held, reason="the metric fell", events=tuple(events))

    def _learn(self, metric: float, now: CodecChoice, settings: RollbackOnDrop) -> None:
        state = self._state
        mean = metric if state.mean is None else state.mean + settings.smoothing * (metric - state.mean)
        state.mean = mean
        if state.best is None or mean >= state.best:
            state.best, state.good, state.below = mean, now, 0
        else:
            state.below = state.below + 1 if mean < state.best - settings.drop else 0

    def _end(self, settings: RollbackOnDrop) -> list[str]:
        """Ends a hold; returns the events to report."""
        state = self._state
        stayed, state.held, state.below = state.held, None, 0
        if stayed is None or state.mean is None or state.best is None or state.mean >= state.best - settings.drop:
            return []
        state.best = state.mean
        return [f"the metric did not recover with {stayed.text}: compression was not the cause"]

    def state(self) -> dict[str, object]:
        """Returns the state as plain values."""
        return dump(self._state)

    def restore(self, plain: object) -> None:
        """Restores the state.

        Raises:
            PolicyStateInvalid: if it is not a rollback state.
        """
        self._state = load(RollbackState, plain)
