"""The learning rate of an optimiser step, out of two counts: nothing else need be kept.

The warm-up goes by the steps that were taken, because it is the optimiser's moments that it waits for. The decay goes by
how far the run is, so that it ends with the run whatever was skipped on the way.
"""

import math
from dataclasses import dataclass

from fulmen_algorithm.training.settings import OptimizerSettings, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The schedule of a run.

    Attributes:
        settings: Peak, shape and warm-up.

    Raises:
        ValueError: if a schedule that decays lacks `total_steps`.
    """

    settings: OptimizerSettings

    def __post_init__(self) -> None:
        if self.settings.schedule is not Schedule.CONSTANT and self.settings.total_steps is None:
            raise ValueError(f"A {self.settings.schedule} schedule needs total_steps.")

    def at(self, *, taken: int, planned: int, total: int | None = None) -> float:
        """Computes the rate of the next optimiser step.

        Args:
            taken: Optimiser steps that have changed the weights.
            planned: Optimiser steps planned before this one.
            total: Those of the whole run; None for the settings' own number.
        """
        settings = self.settings
        warm_up = taken / settings.warmup_steps if taken < settings.warmup_steps else 1.0
        return settings.learning_rate * (warm_up * self._decay(planned, total or settings.total_steps or 0))

    def _decay(self, planned: int, total: int) -> float:
        warmup, schedule = self.settings.warmup_steps, self.settings.schedule
        if schedule is Schedule.CONSTANT or planned < warmup:
            return 1.0
        done = min((planned - warmup) / max(1, total - warmup), 1.0)
        return 1.0 - done if schedule is Schedule.LINEAR else (1.0 + math.cos(math.pi * done)) / 2
