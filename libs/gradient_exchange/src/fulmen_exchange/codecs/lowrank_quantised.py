"""PowerSGD with factors sent as integers of 16 or 8 bits.

A sum of rounded numbers is exact only if all ranks round to multiples of one number and no partial sum is rounded again,
as sums of bfloat16 are at every hop. So the ranks first sum the largest magnitudes of each factor column. This sum bounds
the sum of the factors; it is divided into as many steps as the format can count, and each rank sends its numbers as
multiples of the step. Float16 counts to 2048 without gaps, int8 to 127: sums are exact in any order, and the rounding
error of each rank stays in its residual.

The steps cover the sum: with 8 bits, a rank among 16 has about 8 of them for its own numbers. Hence the default of 16
bits, which sends as much as bfloat16 and rounds 8 times as finely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fulmen_exchange.codecs.codec import CodecEntry, Round
from fulmen_exchange.codecs.lowrank import LowRank, LowRankSettings, concatenate, split_like

if TYPE_CHECKING:
    from torch import Tensor

MAX_INTEGER = {8: 127, 16: 2048}
"""Largest integer up to which the format has all integers: int8, float16."""
MIN_STEPS = 16
"""Of a whole column; with fewer steps nothing of it would remain."""
ZERO = 1e-30
"""Columns whose largest magnitudes sum to less are sent as zeros and stay in the residual: float32 has no steps for them."""


class LowRankQuantisedSettings(LowRankSettings):
    """Settings of `lowrank_quantised`.

    Attributes:
        bits: Bits per element of a factor; 16 or 8, default 16. Use 8 with few ranks only: sums have 8 bits as well.
    """

    codec: Literal["lowrank_quantised"] = "lowrank_quantised"
    bits: Literal[8, 16] = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankQuantised(LowRank):
    """Sums factors as integers with a scale shared by all ranks.

    Attributes:
        bits: Bits per element of a factor.
    """

    bits: int
    name = "lowrank_quantised"
    version = 1

    def sum_factors(
        self, factors: list[Tensor], dense: Tensor, all_reduce: Callable[[Tensor], None], round_: Round
    ) -> list[Tensor]:
        """See `LowRank`; makes two sums, of float32 (scales and dense part) and of integers.

        Raises:
            ValueError: if there are too many ranks for the number of bits.
        """
        # Each rank may round up by half a step; one more for rounding of the summed magnitudes.
        top = MAX_INTEGER[self.bits] - round_.world_size / 2 - 1
        if top < MIN_STEPS:
            raise ValueError(f"{self.bits} bits are too few for the sum of {round_.world_size} ranks")
        exact = [*(each.abs().amax(dim=1, keepdim=True) for each in factors), dense]
        sums = concatenate(exact)
        if sums.numel():
            all_reduce(sums)
        *largest, dense = split_like(sums, exact)
        if not factors:
            return [dense]
        steps = [each * (each > ZERO) / top for each in largest]
        for each, step in zip(factors, steps, strict=True):
            each.div_(step + step.eq(0)).round_().mul_(step.ne(0))
        whole = concatenate(factors)
        whole = whole.half() if self.bits == 16 else whole.char()
        all_reduce(whole)
        for each, step in zip(factors, steps, strict=True):
            each.mul_(step)
        found = split_like(whole.float(), factors)
        return [*(each * step for each, step in zip(found, steps, strict=True)), dense]


ENTRIES = (
    CodecEntry(
        settings=LowRankQuantisedSettings,
        make=lambda settings: LowRankQuantised(
            matrix_rank=settings.matrix_rank, min_ratio=settings.min_ratio, bits=settings.bits
        ),
    ),
)
