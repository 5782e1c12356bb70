"""Two sets of rollouts of the same tasks, compared task by task.

Source of the interval: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13: percentile bootstrap. Tasks
are resampled, not rollouts: samples of one task depend on each other.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["METHOD", "Comparison", "Pair", "Side", "SideTask", "compared"]

RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95
EQUAL: Final = 1e-9
"""Mean rewards that differ by less are equal: sums of floating-point numbers depend on their order."""
SHOWN_ROLLOUTS: Final = 16
METHOD: Final = f"paired bootstrap over tasks, percentile, {RESAMPLES} resamples"


@dataclass(slots=True, kw_only=True)
class SideTask:
    """A task of one side."""

    input: bytes = b""
    total: float = 0.0
    count: int = 0
    rollouts: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean reward of its rollouts, of which there is at least one."""
        return self.total / self.count

    def add(self, rollout: str, reward: float) -> None:
        """Adds a rollout."""
        self.total += reward
        self.count += 1
        if len(self.rollouts) < SHOWN_ROLLOUTS:
            self.rollouts.append(rollout)


@dataclass(slots=True, kw_only=True)
class Side:
    """What was read of a side: its tasks by digest of their input, and how many rollouts have no reward."""

    tasks: dict[bytes, SideTask] = field(default_factory=dict)
    unscored: int = 0

    @property
    def scored(self) -> int:
        """Number of its rollouts with a reward."""
        return sum(task.count for task in self.tasks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A task with the mean rewards of both sides."""

    baseline: SideTask
    candidate: SideTask

    @property
    def difference(self) -> float:
        """How much better the candidate is; 0 if both are equal."""
        found = self.candidate.mean - self.baseline.mean
        return 0.0 if abs(found) < EQUAL else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The tasks of both sides by difference, ascending, and the interval of the mean difference; None of fewer than two."""

    pairs: Sequence[Pair]
    interval: tuple[float, float] | None

    @property
    def baseline_mean(self) -> float:
        """Mean over tasks of the baseline; 0 without one."""
        return sum(pair.baseline.mean for pair in self.pairs) / max(len(self.pairs), 1)

    @property
    def candidate_mean(self) -> float:
        """Mean over tasks of the candidate; 0 without one."""
        return sum(pair.candidate.mean for pair in self.pairs) / max(len(self.pairs), 1)


def compared(baseline: Mapping[bytes, SideTask], candidate: Mapping[bytes, SideTask]) -> Comparison:
    """Compares two sides on the tasks that both have; needs up to a second of CPU; equal input gives equal
    results."""
    both = sorted(baseline.keys() & candidate.keys())
    pairs = [(key, Pair(baseline=baseline[key], candidate=candidate[key])) for key in both]
    pairs.sort(key=lambda each: (each[1].difference, each[0]))
    differences = [pair.difference for _, pair in pairs]
    return Comparison(pairs=[pair for _, pair in pairs], interval=_interval(differences))


def _interval(differences: Sequence[float]) -> tuple[float, float] | None:
    count = len(differences)
    if count < 2:  # One task says nothing of how tasks differ.
        return None
    chance = random.Random(0)  # Resampling needs no secrecy, and is to be repeatable.
    means = sorted(sum(chance.choices(differences, k=count)) / count for _ in range(RESAMPLES))
    cut = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return means[cut], means[-1 - cut]
