"""What the noise of masked sums guarantees."""

from __future__ import annotations

import math

_PRECISION = 1e-6


def epsilon(noise: float, rounds: int, *, delta: float = 1e-5) -> float:
    """Returns epsilon of (epsilon, delta) differential privacy of one rank's gradients after a number of rounds.

    Someone who sees all sums can hardly determine whether a rank took part: for any set of outcomes, the probability with it is at
    most e^epsilon times that without it, plus delta. Rounds of the same noise are one Gaussian mechanism whose noise is smaller by
    the root of their number (Dong, Roth and Su, arXiv:1905.02383, corollary 3.3), and delta of that is known exactly (Balle and
    Wang, arXiv:1805.06530, theorem 8). It holds if all ranks add their noise; numbers are taken as real.

    Args:
        noise: Standard deviation of the noise in a sum, over the largest norm of a rank's gradients: the setting of that name.
        rounds: Number of sums.
        delta: Probability with which the bound may fail; much smaller than one over the number of ranks.

    Raises:
        ValueError: if an argument is out of range.
    """
    if not 0 < delta < 1 or noise < 0 or rounds < 0:
        raise ValueError("delta must be between 0 and 1, and neither noise nor rounds may be negative")
    if not rounds:
        return 0.0
    if not noise:
        return math.inf
    mu = math.sqrt(rounds) / noise
    high = 1.0
    while _delta(high, mu) > delta:
        high *= 2
    low = 0.0
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _delta(middle, mu) <= delta else (middle, high)
    return high


def _delta(epsilon_: float, mu: float) -> float:
    """Returns delta of a Gaussian mechanism: Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)."""
    below = _log_phi(-mu / 2 - epsilon_ / mu) + epsilon_
    return math.exp(_log_phi(mu / 2 - epsilon_ / mu)) - math.exp(min(below, 0.0))


def _log_phi(x: float) -> float:
    """Returns the logarithm of the normal distribution function."""
    if x > -30:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    # The first terms of its asymptotic series, where erfc is below the smallest float.
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / (x * x) + 3 / x**4)
