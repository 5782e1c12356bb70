"""Choosers: the part of a policy that depends on its kind (fixed, stages, adaptive)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Protocol

from fulmen_exchange.policies.decision import CodecChoice, Proposal, RoundStats
from fulmen_exchange.policies.settings import AdaptivePolicy, StagesPolicy
from fulmen_exchange.policies.state import dump, load

GROWS = 1.2
"""Growth from one window to the next, as a factor."""


class Chooser(Protocol):
    """The part of a policy that depends on its kind.

    Attributes:
        needs_energy: Whether captured energy, residual and sparsity must be measured in every round, which costs time.
    """

    needs_energy: bool

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """Returns the proposal for a round.

        Args:
            stats: Statistics, measured while `now` was in effect.
            now: The codec in effect; None without compression.
        """

    def state(self) -> dict[str, object]:
        """Returns the state as plain values."""

    def restore(self, plain: object) -> None:
        """Restores the state.

        Raises:
            PolicyStateInvalid: if it belongs to another policy.
        """


@dataclass(slots=True)
class NoState:
    """The state of a stateless chooser."""


class Fixed:
    """Always proposes the configured codec."""

    needs_energy = False

    def __init__(self, choice: CodecChoice) -> None:
        self._choice = choice

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """See `Chooser`."""
        return Proposal(choice=self._choice, reason="as configured")

    def state(self) -> dict[str, object]:
        """See `Chooser`."""
        return dump(NoState())

    def restore(self, plain: object) -> None:
        """See `Chooser`."""
        load(NoState, plain)


class Stages(Fixed):
    """One ratio per stage of the training."""

    def __init__(self, choice: CodecChoice, settings: StagesPolicy) -> None:
        super().__init__(choice)
        self._stages = settings.stages

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """See `Chooser`."""
        last = len(self._stages) - 1
        at = next((i for i, stage in enumerate(self._stages) if stats.progress < stage.until_progress), last)
        ratios, end = self._stages[at].ratios, self._stages[at].until_progress
        begin = self._stages[at - 1].until_progress if at else 0.0
        part = min(len(ratios) - 1, max(0, int((stats.progress - begin) / (end - begin) * len(ratios))))
        choice = replace(self._choice, ratio=ratios[part])
        return Proposal(choice=choice, reason=f"stage {at + 1} of {last + 1}")


@dataclass(slots=True)
class AdaptiveState:
    """Density, rounds outside the band, and sums of the current window."""

    density: float
    below: int = 0
    above: int = 0
    rounds: int = 0
    residual_sum: float = 0.0
    captured_sum: float = 0.0
    residual_before: float | None = None
    grown: int = 0
    boosted_until: int = 0


class Adaptive:
    """Keeps the captured energy in a band by additive increase and multiplicative decrease of the density.

    Only rounds sent with its own choice count, not those of a warm-up or a rollback.
    """

    needs_energy = True

    def __init__(self, choice: CodecChoice, settings: AdaptivePolicy) -> None:
        self._choice = choice
        self._settings = settings
        ratio = min(max(choice.ratio or 1.0, settings.min_ratio), settings.max_ratio)
        self._state = AdaptiveState(density=1.0 / ratio)

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """See `Chooser`."""
        state, settings = self._state, self._settings
        reason, flush = "captured energy within its band", False
        if now == self._own():
            if self._outgrown(stats):
                state.density, state.boosted_until = 1.0 / settings.min_ratio, stats.number + settings.cool_down
                state.below = state.above = state.grown = 0
                flush = True
            elif stats.number >= state.boosted_until:
                reason = self._follow(stats) or reason
        if stats.number < state.boosted_until:
            reason = "residual beyond its bound"
        return Proposal(choice=self._own(), reason=reason, flush=flush)

    def _own(self) -> CodecChoice:
        settings = self._settings
        ratio = min(max(round(1.0 / self._state.density, 3), settings.min_ratio), settings.max_ratio)
        return replace(self._choice, ratio=ratio)

    def _follow(self, stats: RoundStats) -> str | None:
        """Adjusts the density if the captured energy was outside its band for long enough; returns the reason."""
        state, settings, captured = self._state, self._settings, stats.captured
        if captured is None:
            return None
        # Once all nonzero elements are sent, a larger density changes nothing.
        useful = stats.sparsity is None or state.density < 1.0 - stats.sparsity
        state.below = state.below + 1 if captured < settings.low and useful else 0
        state.above = state.above + 1 if captured > settings.high else 0
        if state.below >= settings.patience:
            state.density = min(state.density + settings.increase, 1.0 / settings.min_ratio)
        elif state.above >= settings.patience:
            state.density = max(state.density * settings.decrease, 1.0 / settings.max_ratio)
        else:
            return None
        side = f"below {settings.low:g}" if state.below else f"above {settings.high:g}"
        state.below = state.above = 0
        return f"captured energy {captured:.3g}, {side}"

    def _outgrown(self, stats: RoundStats) -> bool:
        """Returns whether the residual keeps growing beyond its theoretical bound.

        A compressor that captures phi of the energy bounds it by 2 sqrt(1 - phi) / phi of the gradient norm: Karimireddy et al.,
        arXiv:1901.09847, lemma 3.
        """
        state, settings = self._state, self._settings
        if stats.residual is None or stats.captured is None:
            return False
        state.rounds += 1
        state.residual_sum += stats.residual
        state.captured_sum += stats.captured
        if state.rounds < settings.residual_window:
            return False
        residual, captured = state.residual_sum / state.rounds, state.captured_sum / state.rounds
        before, state.residual_before = state.residual_before, residual
        state.rounds, state.residual_sum, state.captured_sum = 0, 0.0, 0.0
        state.grown = state.grown + 1 if before is not None and residual > GROWS * before else 0
        bound = 2.0 * sqrt(max(1.0 - captured, 0.0)) / captured if captured > 0 else 0.0
        return state.grown >= settings.residual_windows and residual > bound

    def state(self) -> dict[str, object]:
        """See `Chooser`."""
        return dump(self._state)

    def restore(self, plain: object) -> None:
        """See `Chooser`."""
        self._state = load(AdaptiveState, plain)
