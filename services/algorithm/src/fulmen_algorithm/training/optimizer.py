"""Learning rates, and the detection of exploding gradients."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from statistics import median

from fulmen_algorithm.training.settings import OptimizerSettings, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The schedule of a run: the learning rate is a pure function of two counts.

    The warm-up counts the steps taken, because it waits for the optimiser's moments. The decay follows the progress of
    the run and ends with it, regardless of skipped steps.

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
        # From the first step on: at a rate of 0 a whole step of sampling would train nothing.
        warm_up = (taken + 1) / settings.warmup_steps if taken < settings.warmup_steps else 1.0
        return settings.learning_rate * (warm_up * self._decay(planned, total or settings.total_steps or 0))

    def _decay(self, planned: int, total: int) -> float:
        warmup, schedule = self.settings.warmup_steps, self.settings.schedule
        if schedule is Schedule.CONSTANT or planned < warmup:
            return 1.0
        done = min((planned - warmup) / max(1, total - warmup), 1.0)
        return 1.0 - done if schedule is Schedule.LINEAR else (1.0 + math.cos(math.pi * done)) / 2


REMEMBERED = 64
MIN_NORMS = 20
"""Minimum number of norms to detect explosions: the first steps of a run vary more than all later ones."""


class NormWatch:
    """The gradient norms of the last optimiser steps.

    Norms of skipped steps count too: after half of the window, large norms are normal, so a run never skips forever.
    Norms of 0 do not count: there was nothing to learn (for example, all rewards were equal), and the norms after them
    must not seem large.
    """

    def __init__(self, norms: Iterable[float] = ()) -> None:
        """Restores `norms`, newest last."""
        self._norms = deque(norms, maxlen=REMEMBERED)

    @property
    def norms(self) -> list[float]:
        """The remembered norms, newest last."""
        return list(self._norms)

    def explodes(self, norm: float, factor: float | None) -> bool:
        """Records a norm; returns whether it is more than `factor` times the median. `factor` None: never."""
        if not isfinite(norm) or not norm:
            return False  # the caller skips non-finite norms
        exploding = factor is not None and len(self._norms) >= MIN_NORMS and norm > factor * median(self._norms)
        self._norms.append(norm)
        return exploding
