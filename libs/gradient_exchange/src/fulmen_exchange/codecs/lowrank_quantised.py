"""PowerSGD whose factors are sent as whole numbers of 16 or 8 bits.

A sum of rounded numbers is right only if all ranks round to multiples of one number, and if no sum on the way is
rounded again, as sums of bfloat16 are at every hop: what that loses, no rank would keep. So ranks first sum the largest
magnitudes that they have in each column of a factor; that sum, which the sum of the factors cannot exceed, is divided
into as many steps as the format can count, and each rank sends how many steps its numbers are. Float16 counts to 2048
without gaps, int8 to 127: sums are exact in any order, and what rounding left out, each rank keeps back for itself.

The steps are for the sum: with 8 bits, a rank among 16 has about 8 of them for its own numbers. So 16 bits are what
is taken unless given; they send as much as bfloat16 would, and round 8 times as finely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fulmen_exchange.codecs.codec import CodecEntry, Round
from fulmen_exchange.codecs.lowrank import LowRank, LowRankSettings, joined, split_like

if TYPE_CHECKING:
    from torch import Tensor

MOST = {8: 127, 16: 2048}
"""Up to which whole number the format has all of them: int8, float16."""
MIN_STEPS = 16
"""For a whole column; with fewer nothing is left of it."""
ZERO = 1e-30
"""A column whose largest magnitudes sum to less is sent as zeros, and kept back: float32 has no steps for it."""


class LowRankQuantisedSettings(LowRankSettings):
    """Settings of `lowrank_quantised`: those of all low-rank codecs, and one more.

    Attributes:
        bits: Of each element of a factor; 16 or 8, 16 unless given. With 8, few ranks: sums have 8 bits as well.
    """

    codec: Literal["lowrank_quantised"] = "lowrank_quantised"
    bits: Literal[8, 16] = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankQuantised(LowRank):
    """Sums factors as whole numbers, with a scale that all ranks share.

    Attributes:
        bits: Of each element of a factor.
    """

    bits: int
    name = "lowrank_quantised"
    version = 1

    def sum_factors(
        self, factors: list[Tensor], dense: Tensor, all_reduce: Callable[[Tensor], None], round_: Round
    ) -> list[Tensor]:
        """See `LowRank`; two sums: what is in float32 (scales, and what is dense), and the whole numbers.

        Raises:
            ValueError: if there are so many ranks that nothing is left of a number in the sum of all.
        """
        # Each rank may round up by half a step; one more for the rounding of the sum of magnitudes itself.
        top = MOST[self.bits] - round_.world_size / 2 - 1
        if top < MIN_STEPS:
            raise ValueError(f"{self.bits} bits are too few for the sum of {round_.world_size} ranks")
        exact = [*(each.abs().amax(dim=1, keepdim=True) for each in factors), dense]
        sums = joined(exact)
        if sums.numel():
            all_reduce(sums)
        *largest, dense = split_like(sums, exact)
        if not factors:
            return [dense]
        steps = [each * (each > ZERO) / top for each in largest]
        for each, step in zip(factors, steps, strict=True):
            each.div_(step + step.eq(0)).round_().mul_(step.ne(0))
        whole = joined(factors)
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
