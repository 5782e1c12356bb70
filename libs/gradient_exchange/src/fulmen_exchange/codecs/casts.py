"""Sums gradients as float32, or cast to 16 bits for transfer."""

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
"""Of a scale; gradients that would need a smaller one become zeros."""


class NoneSettings(CodecSettings):
    """Settings of `none`: uncompressed float32."""

    has_residual = False
    uses_ring = True
    codec: Literal["none"] = "none"


class Bf16Settings(CodecSettings):
    """Settings of `bf16`: 8 bits of fraction; sums are rounded at every hop."""

    has_residual = False
    uses_ring = True
    fixed_ratio = 2.0
    codec: Literal["bf16"] = "bf16"


class Fp16Settings(CodecSettings):
    """Settings of `fp16`: 11 bits of fraction.

    Attributes:
        limit: Largest magnitude of partial sums; default 16384. Buckets are scaled by a power of two to this limit and back,
            so that small gradients are not lost and sums do not overflow.
    """

    has_residual = False
    uses_ring = True
    fixed_ratio = 2.0
    codec: Literal["fp16"] = "fp16"
    limit: float = Field(default=16384.0, ge=1.0, le=32768.0)


@dataclass(frozen=True, slots=True)
class Cast(LinearCodec):
    """Sums in the format of the wire.

    Attributes:
        name: Name of the codec.
        limit: Largest magnitude of partial sums; None if the format needs no scale.
    """

    name: str
    limit: float | None = None
    version = 1
    residual_name = None

    def new_state(self, bucket: Bucket) -> State:
        """See `LinearCodec`: nothing."""
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
            # The mean of the largest magnitudes, times the ranks, bounds every sum and is the same on all ranks.
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
