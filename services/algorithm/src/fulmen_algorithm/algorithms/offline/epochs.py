"""Settings of an algorithm that goes through a data set in batches: its length in steps or in epochs."""

import math
from typing import Self

from pydantic import Field, model_validator

from fulmen_algorithm.runs.algorithm import AlgorithmSettings, permutation, short_warm_up
from fulmen_algorithm.runs.failure import RunFailed


class EpochSettings(AlgorithmSettings):
    """Settings in addition to those of every algorithm.

    Attributes:
        steps: Steps of the run; 0 to set `epochs` instead.
        epochs: Passes over the data, may be fractional; rounded up to whole steps.
        batch_size: Examples per step; each epoch is a new permutation by the seed.
        report_every: Steps between two reports of metrics.
    """

    steps: int = Field(default=200, ge=0, le=1_000_000)
    epochs: float | None = Field(default=None, gt=0, le=10_000)
    schedule: str = Field(default="cosine", pattern="^(constant|linear|cosine)$")
    warmup_steps: int = Field(default_factory=short_warm_up(10), ge=0)
    checkpoint_every: int = Field(default=100, ge=1)
    batch_size: int = Field(default=64, ge=1, le=65536)
    report_every: int = Field(default=10, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _epochs_decide_the_steps(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("epochs") is not None and "steps" not in given:
            return {**given, "steps": 0}
        return given

    @model_validator(mode="after")
    def _either_steps_or_epochs(self) -> Self:
        if self.epochs is None and not self.steps:
            raise ValueError("steps: must be 1 or more unless epochs is given")
        if self.epochs is not None and self.steps:
            raise ValueError("epochs: give either steps or epochs, not both")
        return self

    def planned(self, examples: int, unit: str = "rows") -> int:
        """Computes the steps of the run from the number of examples, called `unit` in errors.

        Raises:
            RunFailed: if the warm-up would be longer than the run.
        """
        steps = self.steps if self.epochs is None else math.ceil(self.epochs * examples / self.batch_size)
        if self.warmup_steps > steps:
            text = f"warmup_steps is {self.warmup_steps}, but the run has {steps} steps: {examples} {unit}."
            raise RunFailed(text)
        return steps

    def batch(self, step: int, count: int) -> list[int]:
        """Chooses the examples of a step: a pure function of the seed and the step."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = range(positions[0] // count, positions[-1] // count + 1)
        orders = {epoch: permutation(count, self.seed, epoch) for epoch in epochs}
        return [orders[p // count][p % count] for p in positions]
