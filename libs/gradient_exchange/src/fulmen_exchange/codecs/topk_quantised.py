"""Top-k sparsification whose values have 2 to 8 bits, with error feedback.

Source: SparseLoCo, arXiv:2508.15706 (top-k and 2-bit values with error feedback), with three differences: the threshold
is that of the whole bucket and not of each block; values are rounded to the nearest multiple of a scale that each block
of 4096 elements has; and an element that would become zero is not sent at all. So whatever is sent is nearer to the
element than nothing would be, and error feedback never has more to carry than with all of it kept back. No multiple is
zero, so that two bits name four: -2, -1, 1 and 2 times the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import (
    BLOCK,
    RESIDUAL,
    CodecEntry,
    Payload,
    PayloadInvalid,
    Round,
    SegmentCodec,
    State,
)
from fulmen_exchange.codecs.parts import BFLOAT16, INT16, check_finite, check_frame, check_kinds
from fulmen_exchange.codecs.quantised import kind_of, pack, packed_count, unpack
from fulmen_exchange.codecs.sparse import (
    COUNT_BYTES,
    KINDS,
    check,
    check_indices,
    payloads_of,
    select,
    share_of,
)
from fulmen_exchange.settings import CodecSettings

if TYPE_CHECKING:
    from torch import Tensor

NAME = "topk_quantised"
SCALE_BYTES = 2
"""Of a block of which anything is sent."""
MAX_RATIO = 2048.0
"""Beyond it counts and scales alone would be half of what is sent, and more."""


class TopkQuantisedSettings(CodecSettings):
    """Settings of `topk_quantised`.

    Attributes:
        ratio: Bytes of float32 for each byte that is sent; 1 to 2048, 100 unless given.
        bits: Of each value that is sent; 2 to 8, 4 unless given. Its place takes 16 more.
        exact: Sorts all elements instead of every so many-th, which is many times as slow; not unless given.
    """

    sgd_only = True
    codec: Literal["topk_quantised"] = "topk_quantised"
    ratio: float = Field(default=100.0, ge=1, le=MAX_RATIO)
    bits: int = Field(default=4, ge=2, le=8)
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkQuantised(SegmentCodec):
    """Sends the largest elements as small multiples of their block's scale, and keeps the rest back.

    When everything is to be sent, values are bfloat16, as those of `topk`.

    Attributes:
        bits: Of each value.
        exact: Whether the threshold is that of all elements, and no estimate.
    """

    bits: int
    exact: bool = False
    name = NAME
    version = 1

    def new_state(self, like: Tensor) -> State:
        """Keeps back what is not sent."""
        return {RESIDUAL: like.new_zeros(like.numel())}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        residual = state[RESIDUAL]
        share = share_of(round_.ratio, value_bytes=self.bits / 8, block_bytes=COUNT_BYTES + SCALE_BYTES)
        taken = select(gradient, residual, share, exact=self.exact, flush=round_.flush)
        payloads = payloads_of(self.name, self.version, taken, offsets)
        if round_.flush:
            return payloads
        return [
            self._quantised(payload, residual[left:right])
            for payload, (left, right) in zip(payloads, pairwise(offsets), strict=True)
        ]

    def _quantised(self, payload: Payload, residual: Tensor) -> Payload:
        """Rounds the values of a sparse payload; the residual of its segment gets what is rounded away."""
        counts, indices, values = payload.parts[0], payload.parts[1], payload.parts[2].float()
        top = 2 ** (self.bits - 1)
        blocks = _blocks_of(counts)
        largest = values.new_zeros(counts.numel()).scatter_reduce_(0, blocks, values.abs(), "amax")
        # Values are bfloat16 and `top` is a power of two, so this rounds nothing.
        scales = (largest / top).bfloat16()
        steps = scales.float()[blocks]
        multiples = (values / (steps + (steps == 0))).round_().clamp_(-top, top)
        residual.index_add_(0, blocks * BLOCK + indices.long(), values - multiples * steps)
        kept = multiples.nonzero().flatten()
        sent = multiples[kept]
        left = blocks[kept].bincount(minlength=counts.numel())
        parts = (
            left.to(counts.dtype),
            indices[kept],
            pack((sent - (sent > 0).to(sent.dtype)).char(), self.bits),
            scales[left > 0],
        )
        return Payload(codec=self.name, version=self.version, size=payload.size, parts=parts)

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        if len(payload.parts) == len(KINDS):
            kernels.add_sparse(*check(payload, name=self.name, version=self.version, size=out.numel()), out)
            return
        check_frame(payload, name=self.name, version=self.version, size=out.numel())
        counts, indices, packed, scales = check_kinds(payload, (INT16, INT16, kind_of(self.bits), BFLOAT16))
        check_indices(payload, counts, indices)
        filled = counts > 0
        if packed.numel() != packed_count(indices.numel(), self.bits) or scales.numel() != int(filled.sum()):
            raise PayloadInvalid(f"a payload of {self.name} lacks values, or scales of blocks that have some")
        # So that no element is beyond float32 either.
        check_finite(payload, scales.float() * 2 ** (self.bits - 1))
        if bool((scales <= 0).any()):
            raise PayloadInvalid(f"a scale of {self.name} is not above zero")
        blocks = _blocks_of(counts)
        multiples = unpack(packed, self.bits, out.new_zeros(indices.numel()))
        multiples += multiples >= 0
        steps = scales.float()[(filled.long().cumsum(0) - 1)[blocks]]
        out.index_add_(0, blocks * BLOCK + indices.long(), multiples * steps)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Keeps it back again."""
        self.add(payload, state[RESIDUAL][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """The same: the shard keeps back what the sum has too much of."""
        return self


def _blocks_of(counts: Tensor) -> Tensor:
    """Returns the block of each element that is sent: int64 [k]."""
    blocks = counts.new_ones(counts.numel()).long().cumsum(0) - 1
    return blocks.repeat_interleave(counts.long())


ENTRIES = (
    CodecEntry(
        settings=TopkQuantisedSettings,
        make=lambda settings: TopkQuantised(bits=settings.bits, exact=settings.exact),
    ),
)
