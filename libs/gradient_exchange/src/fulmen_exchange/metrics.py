"""Costs of rounds and quality of the compression (`exchange_*`), and the statistics that ranks share before a round.

Invariant: all ranks get the same statistics and decide by them alone. The summed tensor has the same length on every rank,
whatever a rank reports and whenever it joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

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
"""Statistics averaged over the ranks that have them."""
SLOTS = 128
"""Slots for norms and seconds by rank; ranks whose numbers differ by a multiple share one and are added."""
LARGEST = 1e18
"""Norm beyond which squares of float32, or sums of residuals, may overflow; such a gradient counts as not finite."""


@dataclass(slots=True)
class RoundCosts:
    """Seconds by phase, and bytes, of one or more rounds."""

    rounds: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    missed_sums: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0

    @property
    def codec_s(self) -> float:
        """Seconds of encoding, summing and decoding."""
        return self.encode_s + self.decode_s

    def __iadd__(self, other: RoundCosts) -> RoundCosts:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def metrics(self) -> dict[str, float]:
        """Returns the metrics; the ratio is bytes of float32 there and back for each byte that went either way."""
        moved = self.sent_bytes + self.received_bytes
        return {
            "exchange_rounds": float(self.rounds),
            "exchange_raw_bytes": float(self.raw_bytes),
            "exchange_sent_bytes": float(self.sent_bytes),
            "exchange_received_bytes": float(self.received_bytes),
            "exchange_up_bytes": float(self.up_bytes),
            "exchange_down_bytes": float(self.down_bytes),
            "exchange_ratio": 2.0 * self.raw_bytes / moved if moved else 1.0,
            "exchange_missed_sums": float(self.missed_sums),
            "exchange_wait_seconds": self.wait_s,
            "exchange_encode_seconds": self.encode_s,
            "exchange_transfer_seconds": self.transfer_s,
            "exchange_decode_seconds": self.decode_s,
        }


@dataclass(slots=True)
class Energy:
    """Sums of squares and products of what a rank had and sent in a round, over its buckets.

    A codec splits its input x into C(x) and the rest. With error feedback, x includes the previous residual and the rest is the
    new one.
    """

    gradient: float = 0.0
    sent: float = 0.0
    missing: float = 0.0
    both: float = 0.0
    zeros: int = 0
    elements: int = 0
    has_residual: bool = False

    def add(self, *, gradient: Tensor, sent: Tensor, residual: Tensor | None) -> None:
        """Adds a bucket.

        Args:
            gradient: Gradient, float32 [n].
            sent: C(x), float32 [n].
            residual: Residual afterwards, float32 [n]; None without error feedback.
        """
        missing = gradient - sent if residual is None else residual
        self.gradient += float(gradient.square().sum())
        self.sent += float(sent.square().sum())
        self.missing += float(missing.square().sum())
        self.both += float((sent * missing).sum())
        self.zeros += gradient.numel() - int(gradient.count_nonzero())
        self.elements += gradient.numel()
        self.has_residual |= residual is not None

    def means(self) -> dict[str, float]:
        """Returns the statistics to average over the ranks (`MEANS`); empty if nothing was sent."""
        wanted = self.sent + 2 * self.both + self.missing
        if not self.gradient or wanted <= 0:
            return {}
        found = {
            "captured": self.sent / wanted,
            "sparsity": self.zeros / self.elements,
            "relative_error": sqrt(self.missing / wanted),
        }
        if self.sent:
            found["gradient_cosine"] = (self.sent + self.both) / sqrt(self.sent * wanted)
        if self.has_residual:
            found["residual_norm"] = sqrt(self.missing / self.gradient)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Statistics of one rank.

    Attributes:
        norm: Norm of all its gradients.
        compute_s: Seconds of its passes.
        present: Parameters with a gradient on this rank.
        means: Values of `MEANS`, as far as known.
    """

    norm: float
    compute_s: float
    present: Collection[str]
    means: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Statistics of all ranks, the same on each.

    Attributes:
        finite: Whether the gradients of all ranks are finite and can be summed.
        norms: Norms of the ranks' gradients.
        compute_s: Seconds of the slowest rank.
        present: Parameters with a gradient on any rank.
        means: Means by name, without those that no rank knew.
        is_late: Whether the report of this rank came too late, which differs between ranks.
    """

    finite: bool
    norms: tuple[float, ...]
    compute_s: float
    present: frozenset[str]
    means: Mapping[str, float]
    is_late: bool = False


def gather(own: RankReport, names: Sequence[str], link: Link, device: torch.device) -> GroupReport:
    """Sums the reports of all ranks, where the link has a quorum of those that are on time.

    Args:
        own: Report of this rank.
        names: Names of all parameters, in the same order on every rank.
        link: Link to the other ranks.
        device: Device of the summed tensor.
    """
    finite, slot = own.norm <= LARGEST, link.rank % SLOTS
    norms, seconds = [0.0] * SLOTS, [0.0] * SLOTS
    norms[slot], seconds[slot] = own.norm if finite else 0.0, own.compute_s
    known = {name: value for name, value in own.means.items() if isfinite(value)}
    means = [number for name in MEANS for number in (known.get(name, 0.0), float(name in known))]
    present = [float(name in own.present) for name in names]
    numbers = torch.tensor([float(not finite), *means, *norms, *seconds, *present], device=device)
    parts = link.sum_quorum(numbers)
    bad, *rest = numbers.tolist()
    means, rest = rest[: 2 * len(MEANS)], rest[2 * len(MEANS) :]
    return GroupReport(
        finite=not bad,
        norms=tuple(rest[:SLOTS]),
        compute_s=max(rest[SLOTS : 2 * SLOTS]),
        present=frozenset(name for name, count in zip(names, rest[2 * SLOTS :], strict=True) if count),
        means={name: sum_ / count for name, sum_, count in zip(MEANS, means[0::2], means[1::2], strict=True) if count},
        is_late=not all(part.accepted for part in parts),
    )
