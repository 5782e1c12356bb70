"""Settings that keep the entropy of the policy from falling: bonuses, and losses by covariance. Importable without torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fulmen_algorithm.training.strict import Strict


class NoEntropyBonus(Strict):
    """No term in the loss; the entropy is still measured."""

    kind: Literal["none"] = "none"


class EntropyBonus(Strict):
    """Subtracts coefficient * H from the loss of each token, H being the entropy of the distribution at its position.

    Attributes:
        coefficient: Weight of the entropy, in units of the loss per nat.

    Source: A3C (arXiv:1602.01783) section 4; PPO (arXiv:1707.06347) eq. 9.
    """

    kind: Literal["bonus"] = "bonus"
    coefficient: float = Field(default=1e-3, gt=0)


class EntropyTarget(Strict):
    """A bonus only while the entropy is at most `target`, with a coefficient that adapts: c grows by `step` after a
    training step whose entropy was at most `target`, and decreases by `step` after any other, between 0 and `max`.

    The entropy is that of the training step before, over all its trained tokens; the first step has no bonus.

    Attributes:
        target: Entropy in nats per token above which there is no bonus. Choose it a little below the `entropy` of the
            first steps.
        step: Change of the coefficient per training step.
        max: Largest coefficient.

    Source: Skywork-OR1 (arXiv:2505.22312), adaptive entropy control; the bound is TRL's.
    """

    kind: Literal["target"] = "target"
    target: float = Field(default=0.2, gt=0)
    step: float = Field(default=5e-3, gt=0)
    max: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "EntropyTarget":
        if self.step > self.max:
            raise ValueError("step must be at most max")
        return self


EntropySettings = Annotated[NoEntropyBonus | EntropyBonus | EntropyTarget, Field(discriminator="kind")]


class ClipCovLoss(Strict):
    """The loss `clip` without some of the tokens whose covariance is high, which lower the entropy most.

    The covariance of a token is (log proximal - its mean) * (A - its mean), both means over the trained tokens of the
    optimiser step. Of the tokens between `covariance_low` and `covariance_high`, `share` of all tokens, at least one,
    are drawn uniformly and have no gradient.

    Attributes:
        low: Lower bound of the ratio is 1 - low.
        high: Upper bound of the ratio is 1 + high.
        share: r, share of all trained tokens that are left out.
        covariance_low: omega_low, covariance above which a token may be drawn.
        covariance_high: omega_high, covariance below which a token may be drawn.

    Source: Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models"
    (arXiv:2505.22617), Clip-Cov and its settings. There the covariance is that of the trained policy, which is the
    proximal one in the first optimiser step of a batch.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    low: float = Field(default=0.2, gt=0, lt=1)
    high: float = Field(default=0.2, gt=0, le=10)
    share: float = Field(default=2e-4, gt=0, le=1)
    covariance_low: float = 1.0
    covariance_high: float = 5.0

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "ClipCovLoss":
        if self.covariance_low >= self.covariance_high:
            raise ValueError("covariance_low must be less than covariance_high")
        return self


class KlCovLoss(Strict):
    """-r A, unclipped; the tokens of highest covariance also have coefficient * |log r|, which keeps them close to
    the proximal policy.

    The covariance is that of the loss `clip_cov`. It has an effect from the second optimiser step of a batch on, in which
    r is not 1.

    Attributes:
        share: k, share of all trained tokens with the penalty; at least one has it.
        coefficient: beta, weight of the penalty.

    Source: Cui et al. (arXiv:2505.22617), KL-Cov and its settings for 7 billion parameters (k is 2e-4 for 32).
    """

    kind: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-3, gt=0, le=1)
    coefficient: float = Field(default=1.0, gt=0)
