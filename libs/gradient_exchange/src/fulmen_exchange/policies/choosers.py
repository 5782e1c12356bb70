"""Which choice a round should have, by kind of policy: fixed, by stages of the training, adaptive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Protocol

from fulmen_exchange.policies.decision import CodecChoice, Proposal, RoundStats
from fulmen_exchange.policies.settings import AdaptivePolicy, StagesPolicy
from fulmen_exchange.policies.state import dump, load

GROWS = 1.2
"""From one window to the next: more than that is growth."""


class Chooser(Protocol):
    """The part of a policy that differs by its kind.

    Attributes:
        needs_energy: Whether it reads what was captured, kept back and zero in every round, which costs time to measure.
    """

    needs_energy: bool

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """Takes a round's stats in, which were measured while `now` was in effect; returns what it wants."""

    def state(self) -> dict[str, object]:
        """Returns what is remembered, as plain values."""

    def restore(self, plain: object) -> None:
        """Goes on from it.

        Raises:
            PolicyStateInvalid: if it is none.
        """


@dataclass(slots=True)
class NothingKept:
    """The state of what has none."""


class Fixed:
    """The choice of the codec's own settings."""

    needs_energy = False

    def __init__(self, choice: CodecChoice) -> None:
        self._choice = choice

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """See `Chooser`."""
        return Proposal(choice=self._choice, reason="as set")

    def state(self) -> dict[str, object]:
        """See `Chooser`."""
        return dump(NothingKept())

    def restore(self, plain: object) -> None:
        """See `Chooser`."""
        load(NothingKept, plain)


class Stages(Fixed):
    """A ratio for each stage of the training."""

    def __init__(self, choice: CodecChoice, settings: StagesPolicy) -> None:
        super().__init__(choice)
        self._stages = settings.stages

    def choose(self, stats: RoundStats, *, now: CodecChoice | None) -> Proposal:
        """See `Chooser`."""
        last = len(self._stages) - 1
        at = next((i for i, stage in enumerate(self._stages) if stats.progress < stage.until_progress), last)
        choice = replace(self._choice, ratio=self._stages[at].ratio)
        return Proposal(choice=choice, reason=f"stage {at + 1} of {last + 1}")


@dataclass(slots=True)
class AdaptiveState:
    """What is remembered: the density, rounds out of the band, and means of a window."""

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
    """Keeps the captured energy in a band, by additive increase and multiplicative decrease of the density.

    Only rounds that were sent with its own choice count: not those of the warm-up, or after a roll back.
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
        reason, flush = "the captured energy is in its band", False
        if now == self._own():
            if self._outgrown(stats):
                state.density, state.boosted_until = 1.0 / settings.min_ratio, stats.number + settings.cool_down
                state.below = state.above = state.grown = 0
                flush = True
            elif stats.number >= state.boosted_until:
                reason = self._follow(stats) or reason
        if stats.number < state.boosted_until:
            reason = "what is kept back has grown beyond its bound"
        return Proposal(choice=self._own(), reason=reason, flush=flush)

    def _own(self) -> CodecChoice:
        settings = self._settings
        ratio = min(max(round(1.0 / self._state.density, 3), settings.min_ratio), settings.max_ratio)
        return replace(self._choice, ratio=ratio)

    def _follow(self, stats: RoundStats) -> str | None:
        """Moves the density, if the captured energy was out of its band for long enough; says why."""
        state, settings, captured = self._state, self._settings, stats.captured
        if captured is None:
            return None
        # Beyond the share of elements that are not 0, a larger density sends nothing more.
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
        return f"the captured energy was {captured:.3g}, {side}"

    def _outgrown(self, stats: RoundStats) -> bool:
        """Tells whether what is kept back grows from window to window, and is beyond what it could be.

        With a compressor that captures phi of the energy it is bounded by 2 sqrt(1 - phi) / phi of the gradients' norm:
        Karimireddy et al., arXiv:1901.09847, lemma 3.
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
