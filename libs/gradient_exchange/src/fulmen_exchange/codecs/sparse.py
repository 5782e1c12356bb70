"""Shared parts of the sparse codecs, which send some elements of each block of 4096."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import (
    BFLOAT16,
    BLOCK,
    INT16,
    RESIDUAL,
    Payload,
    PayloadInvalid,
    Round,
    SegmentCodec,
    State,
    check_finite,
    check_frame,
    check_kinds,
)

if TYPE_CHECKING:
    from torch import Tensor

INDEX_BYTES = 2
"""Bytes of the index of an element within its block."""
VALUE_BYTES = 2
"""Bytes of a value, in bfloat16."""
COUNT_BYTES = 2
"""Bytes of a block's count, present even if nothing of the block is sent."""
MAX_RATIO = 4096.0
"""Beyond this ratio, counts would be more than half of a payload."""
MIN_SHARE = 1e-5
MAX_OVERSHOOT = 1.3
"""Maximum number of elements that are sent, relative to the requested number."""
KINDS = (INT16, INT16, BFLOAT16)
Taken = tuple["Tensor", "Tensor", "Tensor"]
"""Selected elements: counts by block, indices within the block, and values."""


def share_of(ratio: float, *, value_bytes: float = VALUE_BYTES, block_bytes: float = COUNT_BYTES) -> float:
    """Returns the share of elements to send for a ratio, all overhead included.

    Args:
        ratio: Bytes of float32 per byte to send.
        value_bytes: Bytes per value, without its index.
        block_bytes: Bytes per block, whatever is sent of it.
    """
    bytes_each = 4.0 / ratio - block_bytes / BLOCK
    return min(1.0, max(MIN_SHARE, bytes_each / (INDEX_BYTES + value_bytes)))


def payloads_of(name: str, version: int, taken: tuple[Tensor, Tensor, Tensor], offsets: Sequence[int]) -> list[Payload]:
    """Splits the elements selected from a bucket into one payload per segment."""
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
    """Checks that indices are in their blocks, in ascending order.

    Raises:
        PayloadInvalid: if they do not.
    """
    if counts.numel() != -(-payload.size // BLOCK):
        raise PayloadInvalid(f"{payload.codec}: number of counts does not match the blocks")
    if bool(((counts < 0) | (counts > BLOCK)).any()) or int(counts.sum()) != indices.numel():
        raise PayloadInvalid(f"{payload.codec}: counts do not match the indices")
    if not indices.numel():
        return
    if bool(((indices < 0) | (indices >= BLOCK)).any()):
        raise PayloadInvalid(f"{payload.codec}: index outside its block")
    left_over = payload.size - (counts.numel() - 1) * BLOCK
    if bool((indices[indices.numel() - int(counts[-1]) :] >= left_over).any()):
        raise PayloadInvalid(f"{payload.codec}: index outside the segment")
    # Indices ascend within a block only.
    grows = indices[1:] > indices[:-1]
    begins = counts.long().cumsum(0)
    grows[begins[(begins > 0) & (begins < indices.numel())] - 1] = True
    if not bool(grows.all()):
        raise PayloadInvalid(f"{payload.codec}: indices are not in ascending order")


def check(payload: Payload, *, name: str, version: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of a sparse payload: counts, indices, values.

    Raises:
        PayloadInvalid: if the codec or size is wrong, the parts do not match, or a value is not finite.
    """
    check_frame(payload, name=name, version=version, size=size)
    counts, indices, values = check_kinds(payload, KINDS)
    check_indices(payload, counts, indices)
    if indices.numel() != values.numel():
        raise PayloadInvalid(f"{name}: number of values does not match the indices")
    check_finite(payload, values)
    return counts, indices, values


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback(SegmentCodec):
    """Sends the largest elements of gradient plus residual; the rest stays in the residual (error feedback).

    Attributes:
        name: Name of the codec.
        exact: Whether the threshold is exact instead of estimated.
        scale: Factor of the round's ratio.
        down: Codec of the reply; None for this one.
        min_threshold: Magnitude below which nothing is sent, but in a flush.
    """

    name: str
    exact: bool = False
    scale: float = 1.0
    down: SegmentCodec | None = None
    min_threshold: float = 0.0
    version = 1

    def new_state(self, like: Tensor) -> State:
        """See `SegmentCodec`: the residual."""
        return {RESIDUAL: like.new_zeros(like.numel())}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        taken = select(
            gradient,
            state[RESIDUAL],
            share_of(round_.own_ratio * self.scale),
            exact=self.exact,
            round_=round_,
            min_threshold=self.min_threshold,
        )
        return payloads_of(self.name, self.version, taken, offsets)

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        kernels.add_sparse(*check(payload, name=self.name, version=self.version, size=out.numel()), out)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """See `SegmentCodec`."""
        self.add(payload, state[RESIDUAL][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """See `SegmentCodec`; if it is this codec, the shard has a residual of its own."""
        return self if self.down is None else self.down


def seed_of(round_: Round) -> int:
    """Returns the seed of a rank's choices in a bucket and round."""
    return zlib.crc32(struct.pack("<qqqq", round_.seed, round_.number, round_.rank, round_.bucket))


def sampled(share: float, round_: Round, *tensors: Tensor) -> list[Tensor]:
    """Returns the elements of tensors from which the threshold of a share is estimated; all if they are few."""
    places = kernels.sample_places(tensors[0], share, seed_of(round_))
    return [each if places is None else each[places] for each in tensors]


def select(
    gradient: Tensor, residual: Tensor, share: float, *, exact: bool, round_: Round, min_threshold: float = 0.0
) -> Taken:
    """Adds the residual and selects the largest share of elements, or all of them: see `feedback_select`.

    In a round that is not a flush, none below `min_threshold` are selected.
    """
    if round_.flush:
        return kernels.feedback_select(gradient, residual, 0.0)
    left, right = (residual, gradient) if exact else sampled(share, round_, residual, gradient)
    threshold = max(min_threshold, kernels.threshold_of(left + right, share))
    taken = kernels.feedback_select(gradient, residual, threshold)
    taken, held_back = capped(taken, residual.numel(), share, round_)
    if held_back is not None:
        residual[held_back[0]] += held_back[1]
    return taken


def capped(taken: Taken, size: int, share: float, round_: Round) -> tuple[Taken, tuple[Tensor, Tensor] | None]:
    """Keeps the largest elements of a selection that has far more than requested, as with many equal magnitudes.

    Of equal ones each round keeps others.

    Args:
        taken: Counts, indices and values of the selected elements.
        size: Elements that were selected from.
        share: Requested share.
        round_: The round.

    Returns:
        What is kept of the selection; places and values of the rest, int64 and float32, or None if there is none.
    """
    counts, indices, values = taken
    wanted = max(1, round(share * size))
    if indices.numel() <= MAX_OVERSHOOT * wanted:
        return taken, None
    magnitudes = values.float().abs()
    smallest = magnitudes.topk(wanted).values[-1]
    keeps, equal = magnitudes > smallest, (magnitudes == smallest).nonzero().flatten()
    keeps[equal.roll(-(seed_of(round_) % equal.numel()))[: wanted - int(keeps.sum())]] = True
    blocks, rest = blocks_of(counts), ~keeps
    left = blocks[keeps].bincount(minlength=counts.numel()).to(counts.dtype)
    places = (blocks * BLOCK + indices.long())[rest]
    return (left, indices[keeps], values[keeps]), (places, values[rest].float())


def blocks_of(counts: Tensor) -> Tensor:
    """Returns the block of each selected element: int64 [k]."""
    blocks = counts.new_ones(counts.numel()).long().cumsum(0) - 1
    return blocks.repeat_interleave(counts.long())
