"""Top-k sparsification with values of 2 to 8 bits and error feedback.

Source: SparseLoCo, arXiv:2508.15706 (top-k and 2-bit values with error feedback), with three differences: the threshold is
that of the whole bucket, not of each block; values are rounded to the nearest multiple of a scale per block of 4096
elements; and elements that would become zero are not sent. So everything sent is closer to the element than zero is, and
the residual never exceeds that of sending nothing. Since no multiple is zero, two bits encode -2, -1, 1 and 2 times the
scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import (
    BFLOAT16,
    BLOCK,
    INT16,
    RESIDUAL,
    CodecEntry,
    Payload,
    PayloadInvalid,
    Round,
    SegmentCodec,
    State,
    check_finite,
    check_frame,
    check_kinds,
)
from fulmen_exchange.codecs.narrow import StateKind, narrowed
from fulmen_exchange.codecs.quantised import kind_of, pack, packed_count, unpack
from fulmen_exchange.codecs.sparse import (
    COUNT_BYTES,
    KINDS,
    blocks_of,
    check,
    check_indices,
    payloads_of,
    select,
    share_of,
)
from fulmen_exchange.codecs.union import Union
from fulmen_exchange.settings import CodecSettings

if TYPE_CHECKING:
    from torch import Tensor

NAME = "topk_quantised"
SCALE_BYTES = 2
"""Bytes of the scale of a block of which anything is sent."""
MAX_RATIO = 2048.0
"""Beyond this ratio, counts and scales would be more than half of a payload."""


class TopkQuantisedSettings(CodecSettings):
    """Settings of `topk_quantised`.

    Attributes:
        ratio: Bytes of float32 per byte sent; 1 to 2048, default 100.
        ratio_down: The same for the sum that is sent back, reached when `ratio` is; the rest stays at the shard. None sends
            everything that ranks have sent, at most every element in bfloat16; 1 to 2048, default None.
        min_threshold: Magnitude below which an element is not sent, whatever the ratio, until a flush; default 0, for none.
        residual: Number format of the residual on the rank, and of its momentum; `bfloat16` needs half the memory and some time, and
            is rounded stochastically without bias; default `float32`.
        bits: Bits per value; 2 to 8, default 4. The index takes 16 more.
        exact: Whether to sort all elements instead of a sample, which is many times slower; default False.
    """

    sgd_only = True
    codec: Literal["topk_quantised"] = "topk_quantised"
    ratio: float = Field(default=100.0, ge=1, le=MAX_RATIO)
    residual: StateKind = "float32"
    min_threshold: float = Field(default=0.0, ge=0)
    ratio_down: float | None = Field(default=None, ge=1, le=MAX_RATIO)
    bits: int = Field(default=4, ge=2, le=8)
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkQuantised(SegmentCodec):
    """Sends the largest elements as small multiples of their block's scale; the rest stays in the residual.

    A flush sends bfloat16 values, as `topk` does.

    Attributes:
        bits: Bits per value.
        exact: Whether the threshold is exact instead of estimated.
        scale: Factor of the round's ratio.
        down: Codec of the reply; None for this one.
        min_threshold: Magnitude below which nothing is sent, but in a flush.
    """

    bits: int
    exact: bool = False
    scale: float = 1.0
    down: SegmentCodec | None = None
    min_threshold: float = 0.0
    name = NAME
    version = 1

    def new_state(self, like: Tensor) -> State:
        """See `SegmentCodec`: the residual."""
        return {RESIDUAL: like.new_zeros(like.numel())}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        residual = state[RESIDUAL]
        share = share_of(
            round_.own_ratio * self.scale, value_bytes=self.bits / 8, block_bytes=COUNT_BYTES + SCALE_BYTES
        )
        taken = select(gradient, residual, share, exact=self.exact, round_=round_, min_threshold=self.min_threshold)
        payloads = payloads_of(self.name, self.version, taken, offsets)
        if round_.flush:
            return payloads
        return [
            self._quantised(payload, residual[left:right])
            for payload, (left, right) in zip(payloads, pairwise(offsets), strict=True)
        ]

    def _quantised(self, payload: Payload, residual: Tensor) -> Payload:
        """Quantises the values of a sparse payload; the rounding error is added to the segment's residual."""
        counts, indices, values = payload.parts[0], payload.parts[1], payload.parts[2].float()
        top = 2 ** (self.bits - 1)
        blocks = blocks_of(counts)
        largest = values.new_zeros(counts.numel()).scatter_reduce_(0, blocks, values.abs(), "amax")
        # Exact, since values are bfloat16 and `top` is a power of two.
        scales = (largest / top).bfloat16()
        steps = scales.float()[blocks]
        multiples = (values / (steps + (steps == 0))).round_().clamp_(-top, top)
        residual.index_add_(0, blocks * BLOCK + indices.long(), values - multiples * steps)
        nonzero = multiples.nonzero().flatten()
        sent = multiples[nonzero]
        left = blocks[nonzero].bincount(minlength=counts.numel())
        parts = (
            left.to(counts.dtype),
            indices[nonzero],
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
            raise PayloadInvalid(f"{self.name}: number of values or scales does not match the counts")
        # No element may overflow float32 either.
        check_finite(payload, scales.float() * 2 ** (self.bits - 1))
        if bool((scales <= 0).any()):
            raise PayloadInvalid(f"{self.name}: scale not positive")
        blocks = blocks_of(counts)
        multiples = unpack(packed, self.bits, out.new_zeros(indices.numel()))
        multiples += multiples >= 0
        steps = scales.float()[(filled.long().cumsum(0) - 1)[blocks]]
        out.index_add_(0, blocks * BLOCK + indices.long(), multiples * steps)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """See `SegmentCodec`."""
        self.add(payload, state[RESIDUAL][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """See `SegmentCodec`; if it is this codec, the shard has a residual of its own."""
        return self if self.down is None else self.down


def _made(settings: TopkQuantisedSettings) -> SegmentCodec:
    up = TopkQuantised(bits=settings.bits, exact=settings.exact)
    down = Union() if settings.ratio_down is None else replace(up, scale=settings.ratio_down / settings.ratio)
    return narrowed(replace(up, down=down, min_threshold=settings.min_threshold), settings.residual)


ENTRIES = (CodecEntry(settings=TopkQuantisedSettings, make=_made),)
