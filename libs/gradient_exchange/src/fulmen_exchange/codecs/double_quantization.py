"""Quantises gradients on the way up and sums on the way down, each in its own manner.

Source: Yu et al., NeurIPS 2019, arXiv:1805.10111. Up, rounding is stochastic and unbiased, so the ranks' errors cancel in
the sum and no residual is needed. Down, nothing cancels the error of the single sum: the shard rounds to nearest and adds
what it rounded away to its next sum (as the server in DoubleSqueeze, arXiv:1905.05957). The paper quantises weights on
the way down; here it is sums of gradients, since every rank runs its own optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from fulmen_exchange.codecs.codec import CodecEntry, SegmentCodec
from fulmen_exchange.codecs.quantised import Nearest, Stochastic
from fulmen_exchange.settings import CodecSettings

NAME = "double_quantization"


class DoubleQuantizationSettings(CodecSettings):
    """Settings of `double_quantization`.

    Attributes:
        bits_up: Bits per element that a rank sends; 4 to 8, default 8.
        bits_down: Bits per element of a sum; 2 to 8, default 4. The shard keeps the rounding error for the next sum.
    """

    codec: Literal["double_quantization"] = "double_quantization"
    bits_up: int = Field(default=8, ge=4, le=8)
    bits_down: int = Field(default=4, ge=2, le=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleQuantization(Stochastic):
    """The codec of the ranks; the direction of a payload determines its bits.

    Attributes:
        bits_down: Bits of the reply.
    """

    bits_down: int

    def reply(self) -> SegmentCodec:
        """Returns the codec that rounds to nearest; the shard holds its residual."""
        return Nearest(name=self.name, bits=self.bits_down)


ENTRIES = (
    CodecEntry(
        settings=DoubleQuantizationSettings,
        make=lambda settings: DoubleQuantization(name=NAME, bits=settings.bits_up, bits_down=settings.bits_down),
    ),
)
