"""Stochastic quantisation without bias.

Source: QSGD, arXiv:1610.02132, with the largest magnitude of a block in the place of its L2 norm. It keeps nothing
back: error feedback on a quantiser without bias only hurts (docs/exchange.md).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fulmen_algorithm.exchange import kernels
from fulmen_algorithm.exchange.codec import CodecEntry, Payload, PayloadInvalid, Round, SegmentCodec, State
from fulmen_algorithm.exchange.settings import CodecSettings

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 512
"""Elements that share a scale."""


class QsgdSettings(CodecSettings):
    """Settings of `qsgd`.

    Attributes:
        bits: Of each element, both ways.
    """

    codec: Literal["qsgd"] = "qsgd"
    bits: int = Field(default=8, ge=4, le=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qsgd(SegmentCodec):
    """Rounds up or down at random, so that the mean is exact."""

    bits: int
    name = "qsgd"
    version = 1

    def new_state(self, like: Tensor) -> State:
        """Keeps nothing."""
        return {}

    def encode(self, gradient: Tensor, state: State, cuts: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        seed = zlib.crc32(struct.pack("<qqq", round_.seed, round_.number, round_.rank))
        return [
            Payload(
                codec=self.name,
                version=self.version,
                size=right - left,
                parts=kernels.quantise(gradient[left:right], bits=self.bits, block=BLOCK, begin=left, seed=seed),
            )
            for left, right in pairwise(cuts)
        ]

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        packed, scales = self._checked(payload)
        kernels.add_quantised(packed, scales, out, bits=self.bits, block=BLOCK)

    def _checked(self, payload: Payload) -> tuple[Tensor, Tensor]:
        if (payload.codec, payload.version) != (self.name, self.version) or len(payload.parts) != 2:
            raise PayloadInvalid(f"not a payload of {self.name} version {self.version}")
        packed, scales = payload.parts
        kind, count = (
            ("torch.int8", payload.size) if self.bits == 8 else ("torch.uint8", -(-payload.size // 8) * self.bits)
        )
        if (str(packed.dtype), str(scales.dtype)) != (kind, "torch.float32") or packed.numel() != count:
            raise PayloadInvalid(f"{self.name} with {self.bits} bits is {kind} of {count} elements, and float32")
        if scales.numel() != -(-payload.size // BLOCK) or not bool(scales.isfinite().all()):
            raise PayloadInvalid(f"scales of {self.name} are missing, or not finite")
        return packed, scales

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Loses it: there is nothing that keeps."""

    def reply(self) -> SegmentCodec:
        """The same: a shard is one more rank, whose rounding is drawn for itself."""
        return self


ENTRIES = (CodecEntry(settings=QsgdSettings, make=lambda settings: Qsgd(bits=settings.bits)),)
