"""What ranks tell each other before a round, in one small sum: whether and how each goes on, and what the last round took.

Invariant: every rank gets the same numbers, and all that is decided on a round is decided from them. The tensor that is
summed is as long on every rank, whatever a rank has to tell, and whenever it has joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from fulmen_exchange.links.link import Link

MEANS = (
    "progress",
    "metric",
    "codec_s",
    "transfer_s",
    "captured",
    "residual_norm",
    "sparsity",
    "gradient_cosine",
    "relative_error",
)
"""What is averaged over the ranks that have it."""
SLOTS = 128
"""In which norms and seconds stand for themselves; ranks whose numbers are so far apart share one, and are added up."""
LARGEST = 1e18
"""Norm: beyond it squares of float32 overflow, or sums of what was kept back could; such a gradient is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank tells the others.

    Attributes:
        norm: Of all its gradients.
        compute_s: Seconds of its passes.
        present: Parameters of which it has a gradient.
        means: By name, of `MEANS`; what it does not know it leaves out.
    """

    norm: float
    compute_s: float
    present: Collection[str]
    means: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """What all ranks have told, the same on each.

    Attributes:
        finite: Whether the gradients of all of them are finite, and can be added up.
        norms: Of their gradients.
        compute_s: Seconds of the slowest.
        present: Parameters of which any has a gradient.
        means: By name; without what nobody knew.
    """

    finite: bool
    norms: tuple[float, ...]
    compute_s: float
    present: frozenset[str]
    means: Mapping[str, float]


def gather(told: RankReport, names: Sequence[str], link: Link, device: torch.device) -> GroupReport:
    """Sums what all ranks tell.

    Args:
        told: By this rank.
        names: Of all parameters, in the same order on every rank.
        link: Sums it.
        device: Of the tensor that is summed.
    """
    finite, slot = told.norm <= LARGEST, link.rank % SLOTS
    norms, seconds = [0.0] * SLOTS, [0.0] * SLOTS
    norms[slot], seconds[slot] = told.norm if finite else 0.0, told.compute_s
    known = {name: value for name, value in told.means.items() if isfinite(value)}
    means = [number for name in MEANS for number in (known.get(name, 0.0), float(name in known))]
    present = [float(name in told.present) for name in names]
    numbers = torch.tensor([float(not finite), *means, *norms, *seconds, *present], device=device)
    link.all_reduce(numbers)
    bad, *rest = numbers.tolist()
    means, rest = rest[: 2 * len(MEANS)], rest[2 * len(MEANS) :]
    return GroupReport(
        finite=not bad,
        norms=tuple(rest[:SLOTS]),
        compute_s=max(rest[SLOTS : 2 * SLOTS]),
        present=frozenset(name for name, count in zip(names, rest[2 * SLOTS :], strict=True) if count),
        means={name: sum_ / count for name, sum_, count in zip(MEANS, means[0::2], means[1::2], strict=True) if count},
    )
