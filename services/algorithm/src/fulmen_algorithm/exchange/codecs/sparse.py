"""What the sparse codecs have in common: blocks of 4096 elements, of which some are sent in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fulmen_algorithm.exchange import kernels
from fulmen_algorithm.exchange.codec import BLOCK, Payload, PayloadInvalid, Round, SegmentCodec, State

if TYPE_CHECKING:
    from torch import Tensor

BYTES = 4
"""Of an element that is sent: 16 bits for its place in the block, 16 for its value."""
RESIDUAL = "residual"


def share_of(ratio: float) -> float:
    """Returns the share of elements to send, so that `ratio` bytes of float32 become one."""
    return min(1.0, 1.0 / ratio)


def payloads_of(name: str, version: int, taken: tuple[Tensor, Tensor, Tensor], cuts: Sequence[int]) -> list[Payload]:
    """Cuts what was taken from a bucket into one payload for each segment."""
    counts, places, values = taken
    found, begin = [], 0
    for left, right in pairwise(cuts):
        part = counts[left // BLOCK : -(-right // BLOCK)]
        end = begin + int(part.sum())
        parts = (part, places[begin:end], values[begin:end])
        found.append(Payload(codec=name, version=version, size=right - left, parts=parts))
        begin = end
    return found


def check(payload: Payload, *, name: str, version: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of a sparse payload: counts, places, values.

    Raises:
        PayloadInvalid: if they do not fit each other, or name an element that is not there.
    """
    if (payload.codec, payload.version) != (name, version) or len(payload.parts) != 3:
        raise PayloadInvalid(f"not a payload of {name} version {version}")
    counts, places, values = payload.parts
    kinds = tuple(str(part.dtype) for part in payload.parts)
    if kinds != ("torch.int16", "torch.int16", "torch.bfloat16"):
        raise PayloadInvalid(f"{name} is int16, int16 and bfloat16")
    if counts.numel() != -(-payload.size // BLOCK) or places.numel() != values.numel():
        raise PayloadInvalid(f"parts of {name} do not fit each other")
    last = payload.size - (counts.numel() - 1) * BLOCK
    bad_counts = bool(((counts < 0) | (counts > BLOCK)).any()) or int(counts.sum()) != places.numel()
    if bad_counts or bool(((places < 0) | (places >= BLOCK)).any()):
        raise PayloadInvalid(f"{name} names places that are not in their block")
    in_last = places[places.numel() - int(counts[-1]) :]
    if bool((in_last >= last).any()) or not bool(values.isfinite().all()):
        raise PayloadInvalid(f"{name} names an element that is not there, or a value that is not finite")
    return counts, places, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback(SegmentCodec):
    """Sends the largest of what was kept back and came anew; the rest is kept back (error feedback).

    Attributes:
        name: Of the codec.
        exact: Whether the threshold is that of all elements, and no estimate.
    """

    name: str
    exact: bool = False
    version = 1

    def new_state(self, like: Tensor) -> State:
        """Keeps back what is not sent."""
        return {RESIDUAL: like.new_zeros(like.numel())}

    def encode(self, gradient: Tensor, state: State, cuts: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        residual, threshold = state[RESIDUAL], 0.0
        if not round_.flush:
            of = (lambda tensor: tensor) if self.exact else kernels.sampled
            threshold = kernels.threshold_of(of(residual) + of(gradient), share_of(round_.ratio))
        return payloads_of(self.name, self.version, kernels.feedback_select(gradient, residual, threshold), cuts)

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        kernels.add_sparse(*check(payload, name=self.name, version=self.version), out)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Keeps it back again."""
        self.add(payload, state[RESIDUAL][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """The same: the shard keeps back what the sum has too much of."""
        return self
