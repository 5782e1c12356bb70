"""Guards of a policy: one suspends compression on anomalous gradients, one rolls back when the metric falls."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log
from statistics import median

from fulmen_exchange.policies.decision import CodecChoice, Proposal, RoundStats
from fulmen_exchange.policies.settings import AnomalySettings, NoRollback, RollbackOnDrop
from fulmen_exchange.policies.state import dump, load

REMEMBERED = 64
MIN_NORMS = 20
"""Norms needed before any can be anomalous."""
MIN_DEVIATION = 0.1
"""Of logarithms. Without it, nearly constant norms would turn a difference of a few percent into an explosion."""
MAX_DOUBLINGS = 6


@dataclass(slots=True)
class AnomalyState:
    """Logarithms of recent norms, and round numbers."""

    logs: list[float] = field(default_factory=list)
    streak: int = 0
    streak_kind: str = ""
    off_until: int = 0
    quiet_until: int = 0


class AnomalyWatch:
    """Suspends compression while gradients explode or vanish.

    The largest norm of the ranks is compared with the median and the median absolute deviation of the logarithms of earlier
    norms: norms spread evenly on a logarithmic scale, and a few outliers move neither. Norms of 0, as with equal rewards,
    are ignored. Anomalous norms count too, so a lasting change becomes normal after half the window.
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
        if len(logs) >= MIN_NORMS:
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
    """Returns to earlier codec settings when the metric falls under newer ones.

    The good settings are those in effect when the smoothed metric was at its best. They are held for a cool-down, which each
    further rollback doubles. If the metric has not recovered after that, the settings were not the cause: the best value is
    forgotten and the policy continues.
    """

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
