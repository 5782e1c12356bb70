"""Settings of policies. No torch is needed to read them.

The warm-up of the ratio is defined here only: it is the same for every codec with a ratio.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fulmen_exchange.strict import Strict

Ratio = Annotated[float, Field(ge=1, le=4096)]
"""Bytes of float32 per byte sent. Beyond 4096 the counts would be half of a sparse payload."""


class AnomalySettings(Strict):
    """Suspends compression while gradients explode or vanish.

    Attributes:
        window: Rounds without compression after an anomaly; 0 disables the check.
        cool_down: Rounds after a window before the next one may begin.
        times: Consecutive anomalous rounds that trigger a window.
        explodes_mads: Distance above the median, in median absolute deviations of log norms, at which a norm explodes.
        vanishes_below: Share of the median below which a norm vanishes.
    """

    window: int = Field(default=50, ge=0, le=1_000_000)
    cool_down: int = Field(default=100, ge=0, le=1_000_000)
    times: int = Field(default=3, ge=1, le=1000)
    explodes_mads: float = Field(default=6.0, gt=0)
    vanishes_below: float = Field(default=1e-3, gt=0, lt=1)


class QuietSettings(Strict):
    """Compresses harder while gradients are small.

    Attributes:
        below: Norm of the ranks' gradients below which they count as small; 0 for never.
        factor: Factor of the ratio in such a round, after the warm-up; the ratio never exceeds 4096.
    """

    below: float = Field(default=0.0, ge=0)
    factor: float = Field(default=2.0, ge=1, le=64)


class NoRollback(Strict):
    """Keeps the policy's choice whatever happens to the reward."""

    kind: Literal["none"] = "none"


class RollbackOnDrop(Strict):
    """Returns to the last good codec settings (the model is not changed) when the reward falls.

    Attributes:
        drop: How far the smoothed metric may fall below its best, in its own unit.
        window: Consecutive values below this limit that trigger a rollback.
        smoothing: Weight of the newest value in the exponential mean.
        cool_down: Rounds for which the good settings are held; doubled by each rollback.
    """

    kind: Literal["rollback"]
    drop: float = Field(gt=0)
    window: int = Field(default=5, ge=1, le=10_000)
    smoothing: float = Field(default=0.2, gt=0, le=1)
    cool_down: int = Field(default=500, ge=1, le=1_000_000)


class CommonPolicySettings(Strict):
    """Settings of every policy.

    Attributes:
        warmup_rounds: Rounds over which the ratio grows to its target: 4, 16, 64, 256, one step per quarter
            (arXiv:1712.01887, section 3.3); 0 for no warm-up. Codecs without a ratio have none. A round of an outer loop
            counts once per local step.
        anomaly: Response to exploding or vanishing gradients.
        quiet: Response to small ones.
        rollback: Response to a falling reward.
    """

    warmup_rounds: int = Field(default=100, ge=0, le=10_000_000)
    anomaly: AnomalySettings = AnomalySettings()
    quiet: QuietSettings = QuietSettings()
    rollback: Annotated[NoRollback | RollbackOnDrop, Field(discriminator="kind")] = NoRollback()


class FixedPolicy(CommonPolicySettings):
    """Uses the codec as configured."""

    kind: Literal["fixed"] = "fixed"


class Stage(Strict):
    """A part of the training.

    Attributes:
        until_progress: Where it ends, as a share of the training.
        ratio: Bytes of float32 per byte sent; several for equal parts of the stage, one after another.
    """

    until_progress: float = Field(gt=0, le=1)
    ratio: Ratio | Annotated[tuple[Ratio, ...], Field(min_length=1, max_length=64, strict=False)]

    @property
    def ratios(self) -> tuple[float, ...]:
        """All ratios, in order."""
        return self.ratio if isinstance(self.ratio, tuple) else (self.ratio,)


class StagesPolicy(CommonPolicySettings):
    """One ratio per stage of the training; the highest in the middle, where gradients carry the least new information.

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
            raise ValueError("stages: must be in ascending order and end at 1")
        return self


class AdaptivePolicy(CommonPolicySettings):
    """Keeps the captured energy in a band by additive increase and multiplicative decrease of the density.

    Attributes:
        low: Lower bound of phi = |C(x)|^2 / |x|^2; below it the density grows.
        high: Upper bound; above it the density shrinks.
        min_ratio: Lowest ratio, when most is sent.
        max_ratio: Highest ratio, when least is sent.
        increase: Added to the density (the share of bytes sent).
        decrease: Factor by which the density shrinks.
        patience: Consecutive rounds outside the band before a change.
        residual_window: Rounds over which the residual's norm is averaged.
        residual_windows: Consecutive windows of 20 % growth beyond the theoretical bound that trigger a flush.
        cool_down: Rounds at `min_ratio` after such a flush.
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
            raise ValueError("low must be below high, and min_ratio must not exceed max_ratio")
        return self


class AutoPolicy(CommonPolicySettings):
    """Measures the codecs that suit the optimiser, predicts the step time of each, and picks the fastest.

    Attributes:
        ratios: Candidate ratios of the sparse codec, if there is one.
        probe_rounds: Rounds per measurement; the first of several is discarded.
        measure_every: Rounds between measurements; 0 measures once.
        measure_share: Share of the time between measurements that measuring may take.
        gain: A lossier codec must be faster by more than this share.
        overlap: Share of computing during which gradients are already being sent.
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
            raise ValueError("ratios: must be in ascending order")
        return self


PolicySettings = Annotated[
    FixedPolicy | StagesPolicy | AdaptivePolicy | AutoPolicy,
    Field(discriminator="kind"),
]
