"""Durations of attempts in logarithmic buckets: mergeable counts with quantiles of bounded relative error."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "DurationSketch",
    "bucket_of",
]

RELATIVE_ERROR: Final = 0.02


GAMMA: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)


MIN_DURATION_S: Final = 0.001


MAX_BUCKET: Final = 600


def bucket_of(duration_s: float) -> int:
    """Returns the bucket of a duration: bucket i holds (1 ms * gamma^(i-1), 1 ms * gamma^i]."""
    if duration_s <= MIN_DURATION_S:
        return 0
    return min(MAX_BUCKET, math.ceil(math.log(duration_s / MIN_DURATION_S) / math.log(GAMMA)))


@dataclass(slots=True)
class DurationSketch:
    """Counts of one task type's durations by bucket."""

    counts: Counter[int] = field(default_factory=Counter)
    total: int = 0

    def add(self, bucket: int, count: int = 1) -> None:
        """Counts durations."""
        self.counts[bucket] += count
        self.total += count

    def quantile_s(self, share: float) -> float:
        """Returns the quantile of the durations, seconds; 0 if none was measured.

        The result is within 2 % of the sample of rank `floor(share * (n - 1))`, for durations from 1 ms to over a day.
        """
        rank = math.floor(share * (self.total - 1))
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen > rank:
                return _middle_s(bucket)
        return 0.0

    def mean_s(self) -> float:
        """Returns the mean duration, seconds, within 2 %; 0 if none was measured."""
        if not self.total:
            return 0.0
        return sum(count * _middle_s(bucket) for bucket, count in self.counts.items()) / self.total


def _middle_s(bucket: int) -> float:
    """Returns the point of a bucket with the same relative distance to both bounds."""
    return MIN_DURATION_S * 2 * GAMMA**bucket / (GAMMA + 1)
