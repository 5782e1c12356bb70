"""What algorithms have in common that follow the gradient of a policy on groups: their settings, and their figures."""

from collections.abc import Sequence

from pydantic import Field

from fulmen_algorithm.domain.algorithm import AlgorithmSettings, RolloutLimits
from fulmen_algorithm.training.advantages import StdNormalisation
from fulmen_algorithm.training.losses import Aggregation, LossSettings
from fulmen_algorithm.training.step import BatchSettings, StepResult, StepSettings


class PolicyGradientSettings(AlgorithmSettings):
    """Settings beside those of every algorithm. The defaults were tried on models of 0.5 to 5 M parameters.

    Attributes:
        prompts_per_step: B, groups of one training step.
        temperature: Sampling temperature of the rollouts that are trained on.
        max_tokens: Longest answer of one model call that this run samples, in tokens.
        epochs: Passes over the rows of a step.
        minibatches: Optimiser steps per pass.
        clip_low: The probability ratio counts no lower than 1 - clip_low.
        clip_high: And no higher than 1 + clip_high.
        importance_cap: C of truncated importance sampling; null switches it off.
        aggregation: `token_mean` for single-turn agents, `per_rollout_mean` for multi-turn ones.
        advantage_std: `none`, `group` or `batch`: what centred rewards are divided by.
        mask_truncated: Leaves rollouts out whose answer ended at the token limit, instead of scoring them.
        validate_every: Steps between validations; there is always one at the start and one at the end.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Attempts of one rollout, where the failure is not the agent's.
    """

    learning_rate: float = Field(default=5e-4, gt=0, le=1)
    warmup_steps: int = Field(default=5, ge=0)
    prompts_per_step: int = Field(default=32, ge=1, le=4096)
    temperature: float = Field(default=1.0, gt=0, le=2)
    max_tokens: int = Field(default=64, ge=1, le=1_048_576)
    epochs: int = Field(default=1, ge=1, le=100)
    minibatches: int = Field(default=4, ge=1, le=1000)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0, le=10)
    importance_cap: float | None = Field(default=2.0, gt=0)
    aggregation: str = Field(default=Aggregation.TOKEN_MEAN.value, pattern="^(token_mean|per_rollout_mean)$")
    advantage_std: str = Field(default=StdNormalisation.NONE.value, pattern="^(none|group|batch)$")
    mask_truncated: bool = True
    validate_every: int = Field(default=20, ge=1)
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    rollout_attempts: int = Field(default=8, ge=1, le=100)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps * self.epochs * self.minibatches

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits(timeout_s=self.rollout_timeout_s, attempts=self.rollout_attempts)

    @property
    def step_settings(self) -> StepSettings:
        """Settings of an optimiser step."""
        loss = LossSettings(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            importance_cap=self.importance_cap,
            aggregation=Aggregation(self.aggregation),
        )
        return StepSettings(
            loss=loss,
            temperature=self.temperature,
            max_grad_norm=self.max_grad_norm,
            token_budget=self.token_budget,
        )

    @property
    def batch_settings(self) -> BatchSettings:
        """How the rows of a step become optimiser steps."""
        return BatchSettings(minibatches=self.minibatches, epochs=self.epochs)

    @property
    def overrides(self) -> dict[str, dict[str, object]]:
        """Request fields by rollout mode: training samples, everything else is greedy."""
        length = {"max_tokens": self.max_tokens}
        return {
            "train": {"temperature": self.temperature, **length},
            "validation": {"temperature": 0, **length},
            "test": {"temperature": 0, **length},
        }

    def shuffling_seed(self, step: int) -> int:
        """Returns the seed of a step's minibatches."""
        return self.seed * 1_000_003 + step


def means(results: Sequence[StepResult]) -> dict[str, float]:
    """Averages the figures of the optimiser steps of one training step; counts are summed."""
    if not results:
        return {"optimizer_steps": 0.0}
    metrics = [r.as_metrics() for r in results]
    averages = {key: sum(m.get(key, 0.0) for m in metrics) / len(metrics) for key in metrics[-1] if key != "seconds"}
    averages["tokens"] = sum(m.get("tokens", 0.0) for m in metrics)
    averages["staleness_max"] = max(m.get("staleness_max", 0.0) for m in metrics)
    return {
        **averages,
        "skipped": float(sum(r.skipped for r in results)),
        "train_seconds": sum(r.seconds for r in results),
        "optimizer_steps": float(len(results)),
    }
