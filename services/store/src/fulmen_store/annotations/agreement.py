"""How far raters agree: Krippendorff's alpha for any number of them, Cohen's kappa for two.

Both are 1 minus observed by expected disagreement. Krippendorff, K. (2011): Computing Krippendorff's Alpha-Reliability. Cohen, J.
(1960): A coefficient of agreement for nominal scales. Cohen, J. (1968): Weighted kappa.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum

__all__ = ["Level", "alpha", "kappa"]


class Level(IntEnum):
    """What values mean."""

    NOMINAL = 1
    ORDINAL = 2
    INTERVAL = 3


def alpha(units: Iterable[Sequence[float]], level: Level) -> float | None:
    """Returns Krippendorff's alpha: 1 for full agreement, 0 for agreement by chance.

    Returns None if no unit has two values, or all values are equal.

    Args:
        units: The values of each unit, in any order; units with fewer than two are ignored.
        level: What values mean.
    """
    pairable = [values for values in units if len(values) > 1]
    pooled = [value for values in pairable for value in values]
    if len(set(pooled)) < 2:
        return None
    if level is Level.NOMINAL:
        observed = sum(_unequal(values) / (len(values) - 1) for values in pairable)
        return 1 - observed * (len(pooled) - 1) / _unequal(pooled)
    place = _places(pooled, level)
    observed = sum(_squares([place[value] for value in values]) / (len(values) - 1) for values in pairable)
    return 1 - observed * (len(pooled) - 1) / _squares([place[value] for value in pooled])


def kappa(pairs: Sequence[tuple[float, float]], level: Level) -> float | None:
    """Returns Cohen's kappa of two raters, weighted by squared differences unless the values are names.

    Returns None without pairs, or if both always gave the same single value.

    Args:
        pairs: What the first and the second gave each unit.
        level: What values mean.
    """
    count, pooled = len(pairs), [value for pair in pairs for value in pair]
    if len(set(pooled)) < 2:
        return None
    if level is Level.NOMINAL:
        first, second = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
        observed = sum(one != other for one, other in pairs) / count
        expected = 1 - sum(times * second[value] for value, times in first.items()) / count**2
        return 1 - observed / expected
    place = _places(pooled, level)
    ones, others = [place[one] for one, _ in pairs], [place[other] for _, other in pairs]
    observed = sum((one - other) ** 2 for one, other in zip(ones, others, strict=True)) / count
    expected = (
        sum(one**2 for one in ones) + sum(other**2 for other in others) - 2 * sum(ones) * sum(others) / count
    ) / count
    return 1 - observed / expected


def _places(values: Sequence[float], level: Level) -> dict[float, float]:
    """Returns where each value is on the scale whose squared differences count: ranks, at the middle of ties, or itself."""
    centre = sum(values) / len(values)
    if level is Level.INTERVAL:
        return {value: value - centre for value in values}
    counts, places, below = Counter(values), {}, 0
    for value in sorted(counts):
        places[value] = below + counts[value] / 2 - len(values) / 2
        below += counts[value]
    return places


def _unequal(values: Sequence[float]) -> int:
    """Returns the number of ordered pairs of unequal values."""
    return len(values) ** 2 - sum(times**2 for times in Counter(values).values())


def _squares(places: Sequence[float]) -> float:
    """Returns the sum of the squared differences of all ordered pairs."""
    centre = sum(places) / len(places)
    return 2 * len(places) * sum((place - centre) ** 2 for place in places)
