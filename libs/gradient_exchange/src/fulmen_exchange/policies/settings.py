"""Settings of policies. No torch is needed to read them.

The warm-up of the ratio has its only home here: it is the same for every codec that has a ratio.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fulmen_exchange.strict import Strict

Ratio = Annotated[float, Field(ge=1, le=4096)]
"""Bytes of float32 for each byte that is sent; beyond it the counts of a sparse payload would be half of it."""


class AnomalySettings(Strict):
    """When gradients explode or vanish, compression is left out for a while.

    Attributes:
        window: Rounds that are sent as they are then; 0 to never do that.
        cool_down: Rounds after a window in which no other begins.
        times: So many rounds in a row have to be out of the ordinary.
        explodes_mads: A norm explodes that is above the median by so many median absolute deviations, of logarithms.
        vanishes_below: A norm vanishes that is below this share of the median.
    """

    window: int = Field(default=50, ge=0, le=1_000_000)
    cool_down: int = Field(default=100, ge=0, le=1_000_000)
    times: int = Field(default=3, ge=1, le=1000)
    explodes_mads: float = Field(default=6.0, gt=0)
    vanishes_below: float = Field(default=1e-3, gt=0, lt=1)


class NoRollback(Strict):
    """Keeps what the policy has chosen, whatever becomes of the reward."""

    kind: Literal["none"] = "none"


class RollbackOnDrop(Strict):
    """Goes back to the last good settings of the compression (not of the model) when the reward falls.

    Attributes:
        drop: How far the smoothed reward, or validation metric, may be below its best, in its own units.
        window: It has to stay there for so many values in a row.
        smoothing: Weight of the newest value in the exponential mean.
        cool_down: Rounds for which the good settings then stand; twice as many each time.
    """

    kind: Literal["rollback"]
    drop: float = Field(gt=0)
    window: int = Field(default=5, ge=1, le=10_000)
    smoothing: float = Field(default=0.2, gt=0, le=1)
    cool_down: int = Field(default=500, ge=1, le=1_000_000)


class CommonPolicySettings(Strict):
    """What all policies have in common.

    Attributes:
        warmup_rounds: Rounds over which the ratio grows to its own, from 4 on, fourfold each quarter (arXiv:1712.01887,
            section 3.3: 4, 16, 62, 250, 1000); 0 for none. Codecs without a ratio have no warm-up. A round of an outer
            loop counts as many times as it has steps.
        anomaly: What gradients that explode or vanish do.
        rollback: What a falling reward does.
    """

    warmup_rounds: int = Field(default=100, ge=0, le=10_000_000)
    anomaly: AnomalySettings = AnomalySettings()
    rollback: Annotated[NoRollback | RollbackOnDrop, Field(discriminator="kind")] = NoRollback()


class FixedPolicy(CommonPolicySettings):
    """The codec as its own settings say."""

    kind: Literal["fixed"] = "fixed"


class Stage(Strict):
    """A part of the training.

    Attributes:
        until_progress: Where it ends, as a share of the training.
        ratio: Bytes of float32 for each byte that is sent.
    """

    until_progress: float = Field(gt=0, le=1)
    ratio: Ratio


class StagesPolicy(CommonPolicySettings):
    """A ratio for each stage of the training: the most in the middle, where gradients say the least that is new.

    Attributes:
        stages: In order; the last one ends at 1.
    """

    kind: Literal["stages"]
    stages: tuple[Stage, ...] = Field(
        default=(
            Stage(until_progress=0.2, ratio=75.0),
            Stage(until_progress=0.8, ratio=150.0),
            Stage(until_progress=1.0, ratio=50.0),
        ),
        strict=False,
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        ends = [stage.until_progress for stage in self.stages]
        if not ends or ends[-1] != 1.0 or any(left >= right for left, right in pairwise(ends)):
            raise ValueError("stages: each must end after the one before it, and the last at 1")
        return self


class AdaptivePolicy(CommonPolicySettings):
    """Keeps the share of energy that is sent in a band: the density grows by steps and shrinks by a factor.

    Attributes:
        low: phi = |C(x)|^2 / |x|^2 of what is sent and what could have been; below it more is sent.
        high: Above it less is sent.
        min_ratio: Of what is sent at most.
        max_ratio: Of what is sent at least.
        increase: Added to the density, the share of bytes that is sent.
        decrease: The density is multiplied by it.
        patience: Rounds in a row that have to be out of the band.
        residual_window: Rounds over which the norm of what is kept back is averaged.
        residual_windows: It must not grow by a fifth so many times in a row, beyond the bound that theory has for it.
        cool_down: Rounds for which the most is sent after that.
    """

    kind: Literal["adaptive"]
    low: float = Field(default=0.25, gt=0, lt=1)
    high: float = Field(default=0.5, gt=0, lt=1)
    min_ratio: Ratio = 10.0
    max_ratio: Ratio = 1000.0
    increase: float = Field(default=0.001, gt=0, lt=1)
    decrease: float = Field(default=0.8, gt=0, lt=1)
    patience: int = Field(default=5, ge=1, le=10_000)
    residual_window: int = Field(default=50, ge=1, le=100_000)
    residual_windows: int = Field(default=4, ge=1, le=100)
    cool_down: int = Field(default=200, ge=1, le=1_000_000)

    @model_validator(mode="after")
    def _bands(self) -> Self:
        if self.low >= self.high or self.min_ratio > self.max_ratio:
            raise ValueError("low must be below high, and min_ratio at most max_ratio")
        return self


class AutoPolicy(CommonPolicySettings):
    """Measures, predicts the seconds of a step for each way to send that the optimiser stands, and takes the cheapest.

    Attributes:
        ratios: Of the sparse codec, where there is one.
        probe_rounds: Rounds for each measurement; the first of several is not counted.
        measure_every: Rounds until it is measured again; 0 for never.
        measure_share: Of the time in between, which measuring again may take.
        gain: A way that loses more than another must be faster by more than this share.
        overlap: Share of the computing during which gradients are sent already.
    """

    kind: Literal["auto"]
    ratios: tuple[Ratio, ...] = Field(default=(50.0, 100.0, 200.0), strict=False)
    probe_rounds: int = Field(default=3, ge=1, le=100)
    measure_every: int = Field(default=1000, ge=0, le=10_000_000)
    measure_share: float = Field(default=0.02, gt=0, le=1)
    gain: float = Field(default=0.1, ge=0, lt=1)
    overlap: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if any(left >= right for left, right in pairwise(self.ratios)):
            raise ValueError("ratios: each must be above the one before it")
        return self


PolicySettings = Annotated[
    FixedPolicy | StagesPolicy | AdaptivePolicy | AutoPolicy,
    Field(discriminator="kind"),
]
