"""The policy: decides what each round of the exchange does.

Invariants: a policy is a function of the statistics it has seen, so all ranks decide alike, and so does one restored from
a stored state. Before gradients switch to another codec, or to no compression, one round flushes the residual: no
gradient is ever dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

from fulmen_exchange.policies.auto import Auto
from fulmen_exchange.policies.choosers import Adaptive, Chooser, Fixed, Stages
from fulmen_exchange.policies.decision import PLAIN, CodecChoice, Decision, Proposal, RoundStats
from fulmen_exchange.policies.guards import AnomalyWatch, Rollback
from fulmen_exchange.policies.settings import (
    AdaptivePolicy,
    AutoPolicy,
    CommonPolicySettings,
    FixedPolicy,
    StagesPolicy,
)
from fulmen_exchange.policies.state import PolicyStateInvalid, dump, load
from fulmen_exchange.settings import CodecSettings, OuterLoopSettings

FIRST_RATIO = 4.0
WARMUP_STAGES = 4
MAX_RATIO = 4096.0
"""Largest ratio of any codec."""
UNBIASED = (PLAIN, CodecChoice(codec="bf16"), CodecChoice(codec="qsgd", bits=8), CodecChoice(codec="qsgd", bits=4))
"""Candidates for any optimiser, from lossless to most lossy."""
SAFE_SPARSE = {"adamw": frozenset[str](), "sgd": frozenset({"dgc"})}
"""Sparse codecs that are also safe, by optimiser."""


@dataclass(slots=True)
class PolicyState:
    """The last round's outcome."""

    choice: CodecChoice | None = None
    enabled: bool = True
    flushed: bool = False


def warmup_ratio(ratio: float, number: int, rounds: int) -> float:
    """Returns the ratio of a round during warm-up: 4, 16, 64, 256, then the target.

    Source: Deep Gradient Compression, arXiv:1712.01887, section 3.3, with densities of 25 %, 6.25 %, 1.5625 %, 0.4 %.

    Args:
        ratio: Target ratio.
        number: Number of the round, from 1.
        rounds: Length of the warm-up in rounds.
    """
    if number > rounds:
        return ratio
    stage = WARMUP_STAGES * (number - 1) // rounds
    return min(ratio, FIRST_RATIO ** (stage + 1))


class Policy:
    """Decides on each round, in order."""

    def __init__(
        self, chooser: Chooser, settings: CommonPolicySettings, *, full_sync_every: int = 0, steps: int = 1
    ) -> None:
        """Starts before the first round.

        Args:
            chooser: The part specific to the kind of policy.
            settings: Settings common to all kinds.
            full_sync_every: Rounds between flushes of the residual; 0 for never.
            steps: Local optimiser steps per round.
        """
        self._chooser = chooser
        self._settings = settings
        self._full_sync_every = full_sync_every
        self._steps = steps
        self._anomaly = AnomalyWatch(settings.anomaly)
        self._rollback = Rollback(settings.rollback)
        self._state = PolicyState()

    @property
    def needs_energy(self) -> bool:
        """Whether captured energy, residual and sparsity must be measured in every round."""
        return self._chooser.needs_energy

    def decide(self, stats: RoundStats) -> Decision:
        """Decides on a round. Called once before each round, and again under the same number if it was skipped."""
        state = self._state
        if not all(isfinite(norm) for norm in stats.gradient_norms):
            choice = state.choice or self._warm(self._chooser.choose(stats, now=None), stats.number).choice
            # If it is sent nevertheless, it leaves a residual.
            state.flushed = False
            reason = "gradient not finite: round skipped"
            return Decision(choice=choice, enabled=state.enabled, flush=False, reason=reason)
        # A flush or an uncompressed round contains no information about the codec.
        plain = state.enabled and not state.flushed
        known = stats if plain else replace(stats, captured=None, residual=None, seconds=None)
        now = state.choice if state.enabled else None
        proposal = self._warm(self._chooser.choose(known, now=now), stats.number)
        proposal = self._quiet(proposal, stats)
        proposal = self._rollback.guard(stats, proposal, now=now)
        off = self._anomaly.off(stats)
        # Uncompressed gradients cannot be suspended.
        return self._step(stats, proposal, None if proposal.choice == PLAIN else off)

    def _warm(self, proposal: Proposal, number: int) -> Proposal:
        ratio, at = proposal.choice.ratio, number * self._steps
        if ratio is None or at > self._settings.warmup_rounds:
            return proposal
        warm = warmup_ratio(ratio, at, self._settings.warmup_rounds)
        return (
            proposal
            if warm == ratio
            else replace(proposal, choice=replace(proposal.choice, ratio=warm), reason="warm-up")
        )

    def _quiet(self, proposal: Proposal, stats: RoundStats) -> Proposal:
        ratio, settings = proposal.choice.ratio, self._settings.quiet
        is_warm = stats.number * self._steps > self._settings.warmup_rounds
        if ratio is None or not is_warm or not max(stats.gradient_norms) < settings.below:
            return proposal
        harder = min(MAX_RATIO, ratio * settings.factor)
        return replace(proposal, choice=replace(proposal.choice, ratio=harder), reason="gradients are small")

    def _step(self, stats: RoundStats, proposal: Proposal, off: str | None) -> Decision:
        """Returns the decision that follows the last one, inserting a flush where a residual would be left behind."""
        state, enabled = self._state, off is None
        reason = proposal.reason if off is None else off
        was, was_enabled = state.choice, state.enabled
        leaves = (
            was is not None and was_enabled and (not enabled or (was.has_residual and was.key != proposal.choice.key))
        )
        if leaves and not state.flushed and was is not None:
            state.flushed = True
            what = proposal.choice.text if enabled else "no compression"
            return Decision(
                choice=was, enabled=True, flush=True, reason=f"before {what}: {reason}", events=proposal.events
            )
        every = self._full_sync_every
        flush = enabled and (proposal.flush or (every > 0 and stats.number % every == 0))
        state.choice, state.enabled, state.flushed = proposal.choice, enabled, flush
        events = proposal.events
        if enabled != was_enabled:
            events = (
                *events,
                f"compression {'on again' if enabled else 'off'} from round {stats.number} on: {reason}",
            )
        if was is not None and enabled and proposal.choice != was:
            events = (*events, f"{proposal.choice.text} after {was.text} from round {stats.number} on: {reason}")
        return Decision(choice=proposal.choice, enabled=enabled, flush=flush, reason=reason, events=events)

    def state(self) -> dict[str, object]:
        """Returns everything later decisions depend on, as JSON values."""
        return {
            "last": dump(self._state),
            "chooser": self._chooser.state(),
            "anomaly": self._anomaly.state(),
            "rollback": self._rollback.state(),
        }

    def restore(self, plain: dict[str, object]) -> None:
        """Restores what `state` returned under the same settings.

        Raises:
            PolicyStateInvalid: if it belongs to another policy.
        """
        if set(plain) != {"last", "chooser", "anomaly", "rollback"}:
            raise PolicyStateInvalid("not the state of a policy")
        self._state = load(PolicyState, plain["last"])
        self._chooser.restore(plain["chooser"])
        self._anomaly.restore(plain["anomaly"])
        self._rollback.restore(plain["rollback"])


def own_choice(settings: CodecSettings) -> CodecChoice:
    """Returns the codec choice that the settings name."""
    fields = settings.model_dump()
    return CodecChoice(codec=settings.name, bits=fields.get("bits", 0), ratio=fields.get("ratio"))


def make_policy(
    settings: CodecSettings,
    *,
    optimizer: str,
    world_size: int,
    gradient_bytes: float,
    supports: Callable[[CodecChoice], bool] = lambda _: True,
) -> Policy:
    """Builds the policy of a codec's settings.

    Args:
        settings: Settings of the codec.
        optimizer: `adamw` or `sgd`; any other is treated as AdamW.
        world_size: Number of ranks.
        gradient_bytes: Bytes of all compressed gradients, as float32.
        supports: Returns whether the link can carry a choice. The configured codec and no compression always work.
    """
    own = own_choice(settings)
    chooser: Chooser
    match settings.policy:
        case FixedPolicy():
            chooser = Fixed(own)
        case StagesPolicy() as stages:
            chooser = Stages(own, stages)
        case AdaptivePolicy() as adaptive:
            chooser = Adaptive(own, adaptive)
        case AutoPolicy() as auto:
            candidates = [choice for choice in candidates_for(own, auto, optimizer=optimizer) if supports(choice)]
            chooser = Auto(candidates, auto, gradient_bytes=gradient_bytes, world_size=world_size)
    steps = settings.outer.steps if isinstance(settings.outer, OuterLoopSettings) else 1
    return Policy(chooser, settings.policy, full_sync_every=settings.full_sync_every, steps=steps)


def candidates_for(own: CodecChoice, settings: AutoPolicy, *, optimizer: str) -> tuple[CodecChoice, ...]:
    """Returns the candidates that suit an optimiser, from lossless to most lossy.

    Sparse codecs are included only if the settings name one, since the optimiser must be set up for it.
    """
    if own.codec not in SAFE_SPARSE.get(optimizer, frozenset()):
        return UNBIASED
    return (*UNBIASED, *(CodecChoice(codec=own.codec, ratio=ratio) for ratio in settings.ratios))
