"""What the sparse codecs have in common: blocks of 4096 elements, of which some are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import BLOCK, RESIDUAL, Payload, PayloadInvalid, Round, SegmentCodec, State
from fulmen_exchange.codecs.parts import BFLOAT16, INT16, check_finite, check_frame, check_kinds

if TYPE_CHECKING:
    from torch import Tensor

INDEX_BYTES = 2
"""Of an element that is sent: its place in the block."""
VALUE_BYTES = 2
"""And its value, in bfloat16."""
COUNT_BYTES = 2
"""Of a block, whether anything of it is sent or not."""
MAX_RATIO = 4096.0
"""Beyond it counts alone would be half of what is sent, and more."""
MIN_SHARE = 1e-5
KINDS = (INT16, INT16, BFLOAT16)


def share_of(ratio: float, *, value_bytes: float = VALUE_BYTES, block_bytes: float = COUNT_BYTES) -> float:
    """Returns the share of elements to send, so that `ratio` bytes of float32 become one, with all that goes with them.

    Args:
        ratio: Bytes of float32 for each byte that is to be sent.
        value_bytes: Of each value; its place is added.
        block_bytes: Of each block, whatever is sent of it.
    """
    bytes_each = 4.0 / ratio - block_bytes / BLOCK
    return min(1.0, max(MIN_SHARE, bytes_each / (INDEX_BYTES + value_bytes)))


def payloads_of(name: str, version: int, taken: tuple[Tensor, Tensor, Tensor], offsets: Sequence[int]) -> list[Payload]:
    """Cuts what was taken from a bucket into one payload for each segment."""
    counts, indices, values = taken
    found, begin = [], 0
    for left, right in pairwise(offsets):
        part = counts[left // BLOCK : -(-right // BLOCK)]
        end = begin + int(part.sum())
        parts = (part, indices[begin:end], values[begin:end])
        found.append(Payload(codec=name, version=version, size=right - left, parts=parts))
        begin = end
    return found


def check_indices(payload: Payload, counts: Tensor, indices: Tensor) -> None:
    """Sees to it that indices are in their blocks, each once, and in order.

    Raises:
        PayloadInvalid: if they are not, or name an element that is not there.
    """
    if counts.numel() != -(-payload.size // BLOCK):
        raise PayloadInvalid(f"a payload of {payload.codec} has not one count for each block")
    if bool(((counts < 0) | (counts > BLOCK)).any()) or int(counts.sum()) != indices.numel():
        raise PayloadInvalid(f"counts of {payload.codec} do not fit its indices")
    if not indices.numel():
        return
    if bool(((indices < 0) | (indices >= BLOCK)).any()):
        raise PayloadInvalid(f"a payload of {payload.codec} names indices that are not in their block")
    left_over = payload.size - (counts.numel() - 1) * BLOCK
    if bool((indices[indices.numel() - int(counts[-1]) :] >= left_over).any()):
        raise PayloadInvalid(f"a payload of {payload.codec} names an element that is not there")
    # Within a block they grow; where a block begins they need not.
    grows = indices[1:] > indices[:-1]
    begins = counts.long().cumsum(0)
    grows[begins[(begins > 0) & (begins < indices.numel())] - 1] = True
    if not bool(grows.all()):
        raise PayloadInvalid(f"a payload of {payload.codec} names an element twice, or not in order")


def check(payload: Payload, *, name: str, version: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of a sparse payload: counts, indices, values.

    Raises:
        PayloadInvalid: if it is of another codec or size, its parts do not fit each other, or a value is not finite.
    """
    check_frame(payload, name=name, version=version, size=size)
    counts, indices, values = check_kinds(payload, KINDS)
    check_indices(payload, counts, indices)
    if indices.numel() != values.numel():
        raise PayloadInvalid(f"a payload of {name} has not one value for each place")
    check_finite(payload, values)
    return counts, indices, values


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

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        taken = select(gradient, state[RESIDUAL], share_of(round_.ratio), exact=self.exact, flush=round_.flush)
        return payloads_of(self.name, self.version, taken, offsets)

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        kernels.add_sparse(*check(payload, name=self.name, version=self.version, size=out.numel()), out)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Keeps it back again."""
        self.add(payload, state[RESIDUAL][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """The same: the shard keeps back what the sum has too much of."""
        return self


def select(
    gradient: Tensor, residual: Tensor, share: float, *, exact: bool, flush: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a gradient to what was kept back and takes the largest share out, or everything: see `feedback_select`."""
    threshold = 0.0
    if not flush:
        parts = [each if exact else kernels.sampled(each) for each in (residual, gradient)]
        threshold = kernels.threshold_of(parts[0] + parts[1], share)
    return kernels.feedback_select(gradient, residual, threshold)
