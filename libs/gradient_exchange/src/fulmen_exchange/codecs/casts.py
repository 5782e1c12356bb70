"""Sums gradients as they are, or rounded to 16 bits on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fulmen_exchange.codecs.codec import Bucket, CodecEntry, LinearCodec, Round, State
from fulmen_exchange.settings import CodecSettings

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_EXPONENT = -100
"""Of a scale; gradients that need a smaller one are zeros."""


class NoneSettings(CodecSettings):
    """Settings of `none`: float32, as it is."""

    has_residual = False
    uses_ring = True
    codec: Literal["none"] = "none"


class Bf16Settings(CodecSettings):
    """Settings of `bf16`: 8 bits of the fraction; sums are rounded at every hop."""

    has_residual = False
    uses_ring = True
    fixed_ratio = 2.0
    codec: Literal["bf16"] = "bf16"


class Fp16Settings(CodecSettings):
    """Settings of `fp16`: 11 bits of the fraction.

    Attributes:
        limit: What sums may reach on their way, without unit: a bucket is scaled by a power of two up or down to it,
            and the sum back. So neither are small gradients lost, nor can sums leave the format; 16384 unless given.
    """

    has_residual = False
    uses_ring = True
    fixed_ratio = 2.0
    codec: Literal["fp16"] = "fp16"
    limit: float = Field(default=16384.0, ge=1.0, le=32768.0)


@dataclass(frozen=True, slots=True)
class Cast(LinearCodec):
    """Sums in a format of the wire; None is float32 itself.

    Attributes:
        name: Of the codec.
        limit: What sums of magnitudes are scaled to; None where the format needs no scale.
    """

    name: str
    limit: float | None = None
    version = 1
    kept = None

    def new_state(self, bucket: Bucket) -> State:
        """Keeps nothing."""
        return {}

    def reduce(self, bucket: Bucket, state: State, all_reduce: Callable[[Tensor], None], round_: Round) -> None:
        """See `LinearCodec`."""
        flat = bucket.flat
        if self.name == "none":
            all_reduce(flat)
            return
        scale = 1.0
        if self.limit is not None:
            largest = flat.abs().max().reshape(1) / round_.world_size
            # A mean of magnitudes: times the ranks, no sum of elements can exceed it, and it is the same on every rank.
            all_reduce(largest)
            limit = self.limit / round_.world_size
            scale = math.ldexp(1.0, max(SMALLEST_EXPONENT, math.frexp(float(largest) / limit)[1]))
        sent = (flat / scale).bfloat16() if self.name == "bf16" else (flat / scale).half()
        all_reduce(sent)
        flat.copy_(sent).mul_(scale)


ENTRIES = (
    CodecEntry(settings=NoneSettings, make=lambda _: Cast("none")),
    CodecEntry(settings=Bf16Settings, make=lambda _: Cast("bf16")),
    CodecEntry(settings=Fp16Settings, make=lambda settings: Cast("fp16", settings.limit)),
)
