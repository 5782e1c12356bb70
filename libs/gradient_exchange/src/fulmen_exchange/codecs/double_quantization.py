"""Quantises gradients on the way up and sums on the way down, each in its own manner.

Source: Yu et al., NeurIPS 2019, arXiv:1805.10111: few bits both ways. Up, rounding is at random and exact in the mean,
so that the errors of the ranks cancel in the sum and no rank keeps anything. Down there is one sum, whose error nothing
cancels: the shard rounds to the nearest, keeps what it has rounded away, and adds it to its next sum (as the server in
DoubleSqueeze, arXiv:1905.05957). The paper rounds weights on the way down; here sums of gradients are, since every rank
steps for itself.
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
        bits_up: Of each element that a rank sends; 4 to 8, 8 unless given.
        bits_down: Of each element of a sum; 2 to 8, 4 unless given. What they leave out, the shard keeps for the next
            sum.
    """

    codec: Literal["double_quantization"] = "double_quantization"
    bits_up: int = Field(default=8, ge=4, le=8)
    bits_down: int = Field(default=4, ge=2, le=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleQuantization(Stochastic):
    """The way up; which way a payload goes says how many bits it has.

    Attributes:
        bits_down: Of the way back.
    """

    bits_down: int

    def reply(self) -> SegmentCodec:
        """Rounds to the nearest, with a state of the shard."""
        return Nearest(name=self.name, bits=self.bits_down)


ENTRIES = (
    CodecEntry(
        settings=DoubleQuantizationSettings,
        make=lambda settings: DoubleQuantization(name=NAME, bits=settings.bits_up, bits_down=settings.bits_down),
    ),
)
