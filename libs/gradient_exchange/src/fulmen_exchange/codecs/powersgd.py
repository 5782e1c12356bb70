"""PowerSGD: gradients as products of two low-rank factors.

Source: Vogels et al., arXiv:1905.13727; `lowrank` lists the differences. It needs two sums, one after the other, which
suits ranks of one cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fulmen_exchange.codecs.codec import CodecEntry, Round
from fulmen_exchange.codecs.lowrank import LowRank, LowRankSettings, concatenate, split_like

if TYPE_CHECKING:
    from torch import Tensor


class PowerSgdSettings(LowRankSettings):
    """Settings of `powersgd`."""

    codec: Literal["powersgd"] = "powersgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSgd(LowRank):
    """Sums factors in float32, all factors of a bucket in one sum."""

    name = "powersgd"
    version = 1

    def sum_factors(
        self, factors: list[Tensor], dense: Tensor, all_reduce: Callable[[Tensor], None], round_: Round
    ) -> list[Tensor]:
        """See `LowRank`; makes one sum."""
        together = [*factors, dense]
        sums = concatenate(together)
        if sums.numel():
            all_reduce(sums)
        return split_like(sums, together)


ENTRIES = (
    CodecEntry(
        settings=PowerSgdSettings,
        make=lambda settings: PowerSgd(matrix_rank=settings.matrix_rank, min_ratio=settings.min_ratio),
    ),
)
