"""Statistics of an evaluation: unbiased pass@k, means, and confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CHUNK = 256
"""Bootstrap resamples drawn per batch; bounds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its confidence interval.

    Attributes:
        mean: The estimate.
        low: Lower end of the interval.
        high: Upper end.
    """

    mean: float
    low: float
    high: float


def pass_at_k(*, samples: int, passed: int, k: int) -> float:
    """Computes an unbiased estimate of the probability that at least one of k samples passes.

    Source: Chen et al. 2021 (arXiv:2107.03374) eq. 1: 1 - C(n - c, k) / C(n, k).

    Args:
        samples: n, at least k.
        passed: c, how many of them passed.
        k: At least 1.

    Raises:
        ValueError: if there are fewer than k samples.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {passed} of {samples} samples.")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def wilson(*, passed: int, samples: int, confidence: float) -> Estimate:
    """Returns a proportion with Wilson's score interval, which is sensible at 0 and 1 and for few samples.

    Source: Wilson 1927, without continuity correction.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    mean, shrunk = passed / samples, 1 + z * z / samples
    centre = (mean + z * z / (2 * samples)) / shrunk
    half = z / shrunk * math.sqrt(mean * (1 - mean) / samples + z * z / (4 * samples * samples))
    return Estimate(mean=mean, low=max(0.0, centre - half), high=min(1.0, centre + half))


def bootstrap(values: Sequence[float], *, confidence: float, resamples: int, seed: int) -> Estimate:
    """Returns a mean over tasks with the percentile interval of means of tasks drawn with replacement.

    Samples of one task depend on each other, so that tasks are drawn and not samples. The result is a function of its
    arguments.

    Args:
        values: One number for each task.
        confidence: Such as 0.95.
        resamples: How many means are drawn.
        seed: Of the draws.
    """
    chance, numbers = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    sizes = [min(CHUNK, resamples - start) for start in range(0, resamples, CHUNK)]
    draws = [numbers[chance.integers(0, len(numbers), size=(size, len(numbers)))].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(draws), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(mean=float(numbers.mean()), low=float(low), high=float(high))
