"""Settings of the gradient exchange. No torch is needed to read them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fulmen_exchange.links.settings import LinkSettings, TorchLinkSettings
from fulmen_exchange.policies.settings import AdaptivePolicy, FixedPolicy, PolicySettings, StagesPolicy
from fulmen_exchange.strict import Strict


class EveryStep(Strict):
    """Exchanges gradients at every optimiser step."""

    kind: Literal["every_step"] = "every_step"


class OuterLoopSettings(Strict):
    """Every rank takes local steps; the resulting change of the weights is exchanged.

    The defaults are those of SparseLoCo (arXiv:2508.15706); DiLoCo's (arXiv:2311.08105) are `momentum = 0.9`,
    `learning_rate = 0.7` and a codec without residual.

    Since weights only move at an outer step, a residual is counted in every round until it is sent: up to 1 / (1 - decay)
    times. If H local steps shorten the distance to the minimum by a share c, outer steps diverge once
    learning_rate * c / ((1 - momentum) (1 - decay)) exceeds 2 and much of the update stays in the residual. Early in training,
    and with AdamW's small steps, c is small: small networks learnt fastest with the defaults at 50, 100 and 400 times fewer
    bytes. Near the minimum with long steps (SGD at a high rate), 0.5 with a decay of 0.9 left a lower loss
    (docs/exchange-scaling.md).

    Attributes:
        steps: H, local optimiser steps between exchanges.
        learning_rate: Learning rate of the outer step.
        momentum: Nesterov momentum of the outer step; 0 for none.
        decay: beta, the factor applied to the residual before new updates are added.
    """

    kind: Literal["outer"]
    steps: int = Field(default=30, ge=1, le=100_000)
    learning_rate: float = Field(default=1.0, gt=0, le=10)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    decay: float = Field(default=0.95, gt=0, le=1)


MAX_GAIN = 20.0
"""Upper bound on how often an outer step may count a residual: that of the published experiments, which were stable."""

OuterSettings = Annotated[EveryStep | OuterLoopSettings, Field(discriminator="kind")]


class CodecSettings(Strict):
    """Settings of every codec; each adds its own, and its name in `codec`.

    Attributes:
        link: Transport between the ranks.
        policy: Decides on each round: the ratio, when to suspend compression, when to roll back.
        outer: Whether gradients or the result of many local steps are exchanged.
        dense: Patterns of parameter names (`fnmatch`) that are summed uncompressed; vectors always are.
        dense_below: Parameters with fewer elements are summed uncompressed.
        check_every: Rounds between comparisons of all ranks' weights; 0 for never.
        full_sync_every: Rounds between flushes of the residual; 0 for never.
        has_residual: Whether part of a gradient may stay in the codec's state.
        uses_ring: Whether encoded gradients can be summed by a ring all-reduce.
        sgd_only: Whether the residual makes AdamW learn badly: late gradients arrive in bursts, which the second moment
            takes for noise (docs/exchange-convergence.md). Does not apply to an outer loop.
        holds_momentum: Whether the codec applies the momentum; the optimiser must have none.
        is_private: Whether nothing of a rank's gradients may be seen by others: all parameters go through the codec, in all
            rounds, and norms are not reported.
        fixed_ratio: Bytes of float32 per byte sent, for codecs with neither a ratio nor bits.
    """

    has_residual: ClassVar[bool] = True
    uses_ring: ClassVar[bool] = False
    sgd_only: ClassVar[bool] = False
    holds_momentum: ClassVar[bool] = False
    is_private: ClassVar[bool] = False
    fixed_ratio: ClassVar[float] = 1.0
    link: LinkSettings = TorchLinkSettings()
    dense: tuple[str, ...] = Field(default=(), strict=False)
    dense_below: int = Field(default=4096, ge=1)
    check_every: int = Field(default=100, ge=0)
    full_sync_every: int = Field(default=0, ge=0)
    policy: PolicySettings = FixedPolicy()
    outer: OuterSettings = EveryStep()

    @property
    def name(self) -> str:
        """The codec's registered name."""
        return str(type(self).model_fields["codec"].default)

    @model_validator(mode="after")
    def _fits_policy(self) -> Self:
        fields = type(self).model_fields
        if isinstance(self.policy, StagesPolicy | AdaptivePolicy) and "ratio" not in fields:
            raise ValueError(f"policy: {self.policy.kind!r} needs a codec with a ratio")
        if isinstance(self.outer, OuterLoopSettings):
            self._fits_outer_loop(self.outer)
        return self

    def _fits_outer_loop(self, outer: OuterLoopSettings) -> None:
        if self.holds_momentum:
            raise ValueError("outer: this codec applies the optimiser's momentum and needs the gradients of every step")
        left = (1.0 - outer.momentum) * (1.0 - outer.decay)
        # Other codecs send their residual within a round or two.
        if self.sgd_only and outer.learning_rate > MAX_GAIN * left * (1.0 + 1e-9):
            raise ValueError(
                f"outer: the residual of {self.name} would be counted more than {MAX_GAIN:g} times, and outer steps overshoot: with"
                f" this momentum and decay, learning_rate must be at most {MAX_GAIN * left:.3g}; lower either to allow more"
            )


def optimizer_problems(settings: CodecSettings, *, is_sgd: bool, has_momentum: bool) -> list[str]:
    """Returns why a codec does not suit an optimiser that steps with every sum; empty if it does."""
    found = []
    if settings.sgd_only and not is_sgd:
        found.append(f"{settings.name} requires SGD; use qsgd, bf16 or double_quantization with another optimiser")
    if settings.holds_momentum and has_momentum:
        found.append(f"the optimiser's momentum must be 0: {settings.name} applies it")
    return found
