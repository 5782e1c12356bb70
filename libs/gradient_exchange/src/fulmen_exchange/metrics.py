"""What rounds have cost and what became of gradients in them, as the stream of a run shows it (`exchange_*`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor


@dataclass(slots=True)
class RoundCosts:
    """What rounds have taken: seconds by what they went into, and bytes."""

    rounds: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    missed_sums: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0

    @property
    def codec_s(self) -> float:
        """Seconds of all that a codec does."""
        return self.encode_s + self.decode_s

    def __iadd__(self, other: RoundCosts) -> RoundCosts:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def metrics(self) -> dict[str, float]:
        """Names the metrics; the ratio is of bytes of float32 for each byte that this rank has sent."""
        return {
            "exchange_rounds": float(self.rounds),
            "exchange_raw_bytes": float(self.raw_bytes),
            "exchange_sent_bytes": float(self.sent_bytes),
            "exchange_received_bytes": float(self.received_bytes),
            "exchange_ratio": self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0,
            "exchange_missed_sums": float(self.missed_sums),
            "exchange_wait_seconds": self.wait_s,
            "exchange_encode_seconds": self.encode_s,
            "exchange_transfer_seconds": self.transfer_s,
            "exchange_decode_seconds": self.decode_s,
        }


@dataclass(slots=True)
class Energy:
    """Squares of norms, and products, of what a rank had and sent in a round, over its buckets.

    What a codec could have sent is x = C(x) + what is missing of it; with error feedback, what was kept back before is
    part of x, and what is missing is kept back now.
    """

    came: float = 0.0
    sent: float = 0.0
    missing: float = 0.0
    both: float = 0.0
    zeros: int = 0
    elements: int = 0
    keeps: bool = False

    def add(self, *, came: Tensor, sent: Tensor, kept: Tensor | None) -> None:
        """Takes a bucket in.

        Args:
            came: Its gradient, float32 [n].
            sent: C(x), float32 [n].
            kept: What is kept back after it, float32 [n]; None where nothing is.
        """
        missing = came - sent if kept is None else kept
        self.came += float(came.square().sum())
        self.sent += float(sent.square().sum())
        self.missing += float(missing.square().sum())
        self.both += float((sent * missing).sum())
        self.zeros += came.numel() - int(came.count_nonzero())
        self.elements += came.numel()
        self.keeps |= kept is not None

    def means(self) -> dict[str, float]:
        """Names what is to be averaged over the ranks (`gathering.MEANS`), where there is anything to tell."""
        wanted = self.sent + 2 * self.both + self.missing
        if not self.came or wanted <= 0:
            return {}
        found = {
            "captured": self.sent / wanted,
            "sparsity": self.zeros / self.elements,
            "relative_error": sqrt(self.missing / wanted),
        }
        if self.sent:
            found["gradient_cosine"] = (self.sent + self.both) / sqrt(self.sent * wanted)
        if self.keeps:
            found["residual_norm"] = sqrt(self.missing / self.came)
        return found
