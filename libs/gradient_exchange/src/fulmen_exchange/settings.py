"""Settings of the exchange of gradients. No torch is needed to read them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fulmen_exchange.links.grpc_settings import GrpcLinkSettings
from fulmen_exchange.policies.settings import AdaptivePolicy, FixedPolicy, PolicySettings, StagesPolicy
from fulmen_exchange.strict import Strict


class TorchLinkSettings(Strict):
    """Ranks of one cluster, through `torch.distributed`: NCCL on GPUs, Gloo on CPUs."""

    kind: Literal["torch"] = "torch"

    @property
    def targets(self) -> tuple[str, ...]:
        """None: ranks talk to each other."""
        return ()


LinkSettings = Annotated[TorchLinkSettings | GrpcLinkSettings, Field(discriminator="kind")]


class EveryStep(Strict):
    """Gradients are exchanged at every step of the optimiser."""

    kind: Literal["every_step"] = "every_step"


class OuterLoopSettings(Strict):
    """Every rank takes steps of its own; what they have moved the weights by is exchanged then.

    The defaults are those of SparseLoCo (arXiv:2508.15706); DiLoCo's (arXiv:2311.08105) are `momentum = 0.9`,
    `learning_rate = 0.7` and a codec without residual.

    What a codec keeps back is counted in every round until it is sent, for the weights have not moved yet: in all up to
    1 / (1 - decay) times. Where H steps shorten the way to the minimum by a share c, outer steps overshoot further and
    further if learning_rate * c / ((1 - momentum) (1 - decay)) is over 2, and much of it is kept back for long. Early in
    a training, and with AdamW's small steps, c is small, and what adds up is what the next rounds would have sent: small
    networks learnt the quickest with the defaults at 50, 100 and 400 times fewer bytes. Near the minimum, with long
    steps (SGD at a high rate), 0.5 and a decay of 0.9 left a lower loss (docs/exchange-scaling.md).

    Attributes:
        steps: H, of each rank's optimiser between exchanges.
        learning_rate: Of the outer step.
        momentum: Of the outer step, Nesterov's; 0 for none.
        decay: beta: what was kept back is multiplied by it before what is new is added.
    """

    kind: Literal["outer"]
    steps: int = Field(default=30, ge=1, le=100_000)
    learning_rate: float = Field(default=1.0, gt=0, le=10)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    decay: float = Field(default=0.95, gt=0, le=1)


MAX_GAIN = 20.0
"""Times that an outer step may count what a codec keeps back: that of the published numbers, with which nets were stable."""

OuterSettings = Annotated[EveryStep | OuterLoopSettings, Field(discriminator="kind")]


class CodecSettings(Strict):
    """What the settings of every codec have in common; each adds its own, and its name in `codec`.

    Attributes:
        link: What carries the payloads.
        policy: What decides on each round: the ratio, when to send without the codec, when to go back.
        outer: Whether gradients are exchanged, or what many steps have done.
        dense: Patterns of parameter names (`fnmatch`) that are summed as they are; vectors always are.
        dense_below: So are parameters with fewer elements.
        check_every: Rounds between comparisons of all ranks' weights; 0 for never.
        full_sync_every: Rounds between those in which all that was kept back is sent; 0 for never.
        has_residual: Whether something of a gradient may stay in its state.
        uses_ring: Whether what it makes of gradients goes round in a ring, as gradients themselves do.
        sgd_only: Whether what it keeps back makes AdamW learn badly: late gradients come in bursts, which the second
            moments take for noise (docs/exchange-convergence.md). Not where every rank has an optimiser of its own.
        holds_momentum: Whether it has the optimiser's momentum, which must have none then.
        fixed_ratio: Bytes of float32 for each byte that is sent, where neither a ratio nor a number of bits says it.
    """

    has_residual: ClassVar[bool] = True
    uses_ring: ClassVar[bool] = False
    sgd_only: ClassVar[bool] = False
    holds_momentum: ClassVar[bool] = False
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
        """What settings name the codec by."""
        return str(type(self).model_fields["codec"].default)

    @model_validator(mode="after")
    def _fits_policy(self) -> Self:
        fields = type(self).model_fields
        if isinstance(self.policy, StagesPolicy | AdaptivePolicy) and "ratio" not in fields:
            raise ValueError(f"policy: {self.policy.kind!r} changes the ratio, which this codec does not have")
        if isinstance(self.outer, OuterLoopSettings):
            self._fits_outer_loop(self.outer)
        return self

    def _fits_outer_loop(self, outer: OuterLoopSettings) -> None:
        if self.holds_momentum:
            raise ValueError("outer: this codec holds the optimiser's momentum, and needs every step's gradients")
        left = (1.0 - outer.momentum) * (1.0 - outer.decay)
        # Those whose gradients are late enough to come in bursts: what others keep back goes in a round or two.
        if self.sgd_only and outer.learning_rate > MAX_GAIN * left * (1.0 + 1e-9):
            raise ValueError(
                f"outer: what {self.name} keeps back would be counted over {MAX_GAIN:g} times, and outer steps overshoot: with"
                f" this momentum and decay learning_rate is at most {MAX_GAIN * left:.3g}; less of either allows more"
            )
