"""A policy: what each round of the exchange does, and what of it the history of the run is told.

Invariants: a policy is a function of what it was told, so every rank that is told the same decides the same, and so
does one that goes on from a stored state. Whenever gradients begin to be sent in another codec, or as they are, the
round before has sent all that was kept back: nothing is ever thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

from fulmen_exchange.policies.anomaly import AnomalyWatch
from fulmen_exchange.policies.auto import Auto
from fulmen_exchange.policies.choosers import Adaptive, Chooser, Fixed, Stages
from fulmen_exchange.policies.decision import PLAIN, CodecChoice, Decision, Proposal, RoundStats
from fulmen_exchange.policies.rollback import Rollback
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
UNBIASED = (PLAIN, CodecChoice(codec="bf16"), CodecChoice(codec="qsgd", bits=8), CodecChoice(codec="qsgd", bits=4))
"""What any optimiser stands, from what loses nothing to what loses most."""
SAFE_SPARSE = {"adamw": frozenset[str](), "sgd": frozenset({"dgc"})}
"""Sparse codecs that an optimiser stands besides, by its name."""


@dataclass(slots=True)
class PolicyState:
    """What the last round did."""

    choice: CodecChoice | None = None
    enabled: bool = True
    flushed: bool = False


def warmup_ratio(ratio: float, number: int, rounds: int) -> float:
    """Returns the ratio of a round, which grows to its own: 4, 16, 64, 256, then what was asked for.

    Source: Deep Gradient Compression, arXiv:1712.01887, section 3.3, whose densities are 25 %, 6.25 %, 1.5625 %, 0.4 %.

    Args:
        ratio: Its own.
        number: The round's, from 1.
        rounds: Of the warm-up.
    """
    if number > rounds:
        return ratio
    stage = WARMUP_STAGES * (number - 1) // rounds
    return min(ratio, FIRST_RATIO ** (stage + 1))


class Policy:
    """Decides on each round, in order; see the module for what holds."""

    def __init__(
        self, chooser: Chooser, settings: CommonPolicySettings, *, full_sync_every: int = 0, steps: int = 1
    ) -> None:
        """Makes it.

        Args:
            chooser: What is particular to its kind.
            settings: What all kinds have in common.
            full_sync_every: Rounds between those in which all that was kept back is sent; 0 for never.
            steps: Of each rank's optimiser in a round.
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
        """Whether it reads what was captured, kept back and zero in every round."""
        return self._chooser.needs_energy

    def decide(self, stats: RoundStats) -> Decision:
        """Says what a round does. Called once before each round; once more with the same number if it was skipped."""
        state = self._state
        if not all(isfinite(norm) for norm in stats.gradient_norms):
            choice = state.choice or self._warm(self._chooser.choose(stats, now=None), stats.number).choice
            # Were it sent all the same, something would be kept back again.
            state.flushed = False
            reason = "a gradient is not finite: the round is to be skipped"
            return Decision(choice=choice, enabled=state.enabled, flush=False, reason=reason)
        # What a flush or a round without compression took and kept back says nothing about the choice.
        plain = state.enabled and not state.flushed
        told = stats if plain else replace(stats, captured=None, residual=None, seconds=None)
        now = state.choice if state.enabled else None
        proposal = self._warm(self._chooser.choose(told, now=now), stats.number)
        proposal = self._rollback.guard(stats, proposal, now=now)
        off = self._anomaly.off(stats)
        # What is sent as it is has nothing to leave out.
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

    def _step(self, stats: RoundStats, proposal: Proposal, off: str | None) -> Decision:
        """Goes from what the last round did to what is wanted, by choice of a flush where something was kept back."""
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
        """Returns all that later decisions depend on, as values that JSON has."""
        return {
            "last": dump(self._state),
            "chooser": self._chooser.state(),
            "anomaly": self._anomaly.state(),
            "rollback": self._rollback.state(),
        }

    def restore(self, plain: dict[str, object]) -> None:
        """Goes on from what `state` has returned, under the same settings.

        Raises:
            PolicyStateInvalid: if it is of another policy.
        """
        if set(plain) != {"last", "chooser", "anomaly", "rollback"}:
            raise PolicyStateInvalid("has other parts than a policy")
        self._state = load(PolicyState, plain["last"])
        self._chooser.restore(plain["chooser"])
        self._anomaly.restore(plain["anomaly"])
        self._rollback.restore(plain["rollback"])


def own_choice(settings: CodecSettings) -> CodecChoice:
    """Returns the choice that a codec's own settings name."""
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
        settings: Of the codec.
        optimizer: `adamw` or `sgd`; what another one stands is taken to be what AdamW does.
        world_size: Ranks.
        gradient_bytes: Of all gradients that are compressed, as float32.
        supports: Whether the link can send in a choice; it always can in that of the settings, and as it is.
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
    """Returns the candidates that an optimiser stands, from what loses nothing to what loses most.

    Sparse ones are among them only if the settings name that codec: an optimiser is set up for it.
    """
    if own.codec not in SAFE_SPARSE.get(optimizer, frozenset()):
        return UNBIASED
    return (*UNBIASED, *(CodecChoice(codec=own.codec, ratio=ratio) for ratio in settings.ratios))
