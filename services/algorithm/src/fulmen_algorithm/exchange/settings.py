"""Settings of the exchange of gradients. No torch is needed to read them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fulmen_algorithm.exchange.policies.settings import AdaptivePolicy, FixedPolicy, PolicySettings, StagesPolicy
from fulmen_algorithm.training.strict import Strict


class TorchLinkSettings(Strict):
    """Ranks of one cluster, through `torch.distributed`: NCCL on GPUs, Gloo on CPUs."""

    kind: Literal["torch"] = "torch"


LinkSettings = Annotated[TorchLinkSettings, Field(discriminator="kind")]


class EveryStep(Strict):
    """Gradients are exchanged at every step of the optimiser."""

    kind: Literal["every_step"] = "every_step"


class OuterLoopSettings(Strict):
    """Every rank takes steps of its own; what they have moved the weights by is exchanged then.

    The defaults are those of SparseLoCo (arXiv:2508.15706); DiLoCo's (arXiv:2311.08105) are `momentum = 0.9`,
    `learning_rate = 0.7` and a codec without residual.

    Attributes:
        steps: H, of each rank's optimiser between exchanges.
        learning_rate: Of the outer step; less where steps shorten the way by much and little of it is sent, for what is
            kept back for several rounds is counted in each of them (docs/exchange-scaling.md).
        momentum: Of the outer step, Nesterov's; 0 for none.
        decay: beta: what was kept back is multiplied by it before what is new is added.
    """

    kind: Literal["outer"]
    steps: int = Field(default=30, ge=1, le=100_000)
    learning_rate: float = Field(default=1.0, gt=0, le=10)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    decay: float = Field(default=0.95, gt=0, le=1)


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
    """

    link: LinkSettings = TorchLinkSettings()
    dense: tuple[str, ...] = ()
    dense_below: int = Field(default=4096, ge=1)
    check_every: int = Field(default=100, ge=0)
    full_sync_every: int = Field(default=0, ge=0)
    policy: PolicySettings = FixedPolicy()
    outer: OuterSettings = EveryStep()

    @model_validator(mode="after")
    def _fits_policy(self) -> Self:
        fields = type(self).model_fields
        if isinstance(self.policy, StagesPolicy | AdaptivePolicy) and "ratio" not in fields:
            raise ValueError(f"policy: {self.policy.kind!r} changes the ratio, which this codec does not have")
        if isinstance(self.outer, OuterLoopSettings) and "momentum" in fields:
            raise ValueError("outer: this codec holds the optimiser's momentum, and needs every step's gradients")
        return self
