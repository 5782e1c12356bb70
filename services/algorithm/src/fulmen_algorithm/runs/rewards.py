"""How the rewards of a step are distributed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_VALUES = 20
"""Rewards that occur, or bins of equal width if there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDistribution:
    """Rewards and their numbers.

    Attributes:
        values: Rewards, ascending, or the middles of bins.
        counts: Number of rollouts by value.
        bin_width: Width of a bin; 0 if the values are the rewards themselves.
    """

    values: Sequence[float]
    counts: Sequence[int]
    bin_width: float = 0.0


def distribution(rewards: Iterable[float]) -> RewardDistribution | None:
    """Returns how rewards are distributed; None without a finite one."""
    counted = Counter(reward for reward in rewards if math.isfinite(reward))
    if not counted:
        return None
    found = sorted(counted.items())
    if len(found) <= MAX_VALUES:
        return RewardDistribution(values=[value for value, _ in found], counts=[count for _, count in found])
    low, width = found[0][0], (found[-1][0] - found[0][0]) / MAX_VALUES
    counts = [0] * MAX_VALUES
    for value, count in found:
        counts[min(int((value - low) / width), MAX_VALUES - 1)] += count
    middles = [low + (place + 0.5) * width for place in range(MAX_VALUES)]
    return RewardDistribution(values=middles, counts=counts, bin_width=width)
