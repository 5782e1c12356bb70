"""Whether a case learns as well as the dense one: differences seed by seed, in units of the dense case's spread.

Both are trained from the same weights on the same data, so a difference of one seed has little noise of its own; the
spread is what another seed alone would have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

NOISE = 1.0
"""Spreads: a mean difference of no more is within noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a case comes to beside its dense one.

    Attributes:
        worse_by: Mean over the seeds of how much worse it is: higher loss, lower reward; negative where it is better.
        seeds: The same of each seed, in order.
        spread: Sample standard deviation of the dense case over its seeds.
    """

    worse_by: float
    seeds: Sequence[float]
    spread: float

    @property
    def spreads(self) -> float:
        """How much worse it is, in units of the spread."""
        return self.worse_by / self.spread

    @property
    def within_noise(self) -> bool:
        """True if it is neither better nor worse than another seed would be."""
        return abs(self.spreads) <= NOISE

    def text(self, unit: str) -> str:
        """Says it in words."""
        if self.within_noise:
            return "within noise"
        return f"{'worse' if self.worse_by > 0 else 'better'} by {abs(self.worse_by):.3f} {unit}"


def spread_of(finals: Sequence[float]) -> float:
    """Returns the sample standard deviation of what seeds have come to.

    Raises:
        ValueError: if there are fewer than two seeds, or all came to the same: nothing can be measured in it.
    """
    if len(finals) < 2 or (spread := stdev(finals)) == 0.0:
        raise ValueError("a spread needs two seeds that have come to different ends")
    return spread


def verdict_of(found: Mapping[int, float], dense: Mapping[int, float], *, higher_is_better: bool) -> Verdict:
    """Holds what a case has come to, by seed, against a dense case with at least these seeds.

    Raises:
        ValueError: if the dense case lacks a seed, or has no spread.
    """
    if missing := sorted(found.keys() - dense.keys()):
        raise ValueError(f"the dense case lacks the seeds {missing}")
    sign = -1.0 if higher_is_better else 1.0
    seeds = [sign * (found[seed] - dense[seed]) for seed in sorted(found)]
    return Verdict(worse_by=fmean(seeds), seeds=seeds, spread=spread_of([dense[seed] for seed in sorted(dense)]))
