"""What the codecs of few bits have in common: blocks of 512 elements that share a scale.

Two ways to round. At random, so that the mean is exact and nothing is to be kept back; or to the nearest, which is
biased, and half as far off: what it rounds away is kept back and comes in the next round (error feedback). The two
do not mix: error feedback on what is exact in the mean only adds noise (docs/exchange.md).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import RESIDUAL, Payload, PayloadInvalid, Round, SegmentCodec, State
from fulmen_exchange.codecs.parts import FLOAT32, INT8, UINT8, check_finite, check_frame, check_kinds

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 512
"""Elements that share a scale."""


def kind_of(bits: int) -> str:
    """Returns what integers of so many bits are sent as: themselves, or planes of bits."""
    return INT8 if bits == 8 else UINT8


def packed_count(size: int, bits: int) -> int:
    """Returns how many numbers of `kind_of` so many integers are."""
    return size if bits == 8 else -(-size // 8) * bits


def pack(whole: Tensor, bits: int) -> Tensor:
    """Packs signed integers, int8 [n], as `kernels.quantise` does: the lowest bits of 8 neighbours are a byte."""
    if bits == 8:
        return whole
    padded = whole.new_zeros(-(-whole.numel() // 8) * 8)
    padded[: whole.numel()] = whole
    groups = padded.view(-1, 8).byte()
    weights = groups.new_tensor([1 << place for place in range(8)])
    planes = groups.new_zeros(groups.shape[0], bits)
    for bit in range(bits):
        planes[:, bit] = (((groups >> bit) & 1) * weights).sum(dim=1, dtype=groups.dtype)
    return planes.flatten()


def unpack(packed: Tensor, bits: int, like: Tensor) -> Tensor:
    """Returns the integers that were packed, as float32 [n]; `like` is as many float32."""
    # With scales of 1 they are what they stand for.
    whole = like.new_zeros(like.numel())
    kernels.add_quantised(packed, like.new_ones(-(-like.numel() // BLOCK)), whole, bits=bits, block=BLOCK)
    return whole


def check(payload: Payload, *, name: str, version: int, bits: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the parts of a quantised payload: integers and scales.

    Raises:
        PayloadInvalid: if it is of another codec, size or number of bits, or a scale is not finite, or below zero.
    """
    check_frame(payload, name=name, version=version, size=size)
    packed, scales = check_kinds(payload, (kind_of(bits), FLOAT32))
    if packed.numel() != packed_count(size, bits) or scales.numel() != -(-size // BLOCK):
        raise PayloadInvalid(f"a payload of {name} has not {bits} bits of each element, or not one scale of each block")
    # So that no element is beyond float32 either.
    check_finite(payload, scales * 2 ** (bits - 1))
    if bool((scales < 0).any()):
        raise PayloadInvalid(f"a scale of {name} is below zero")
    return packed, scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Stochastic(SegmentCodec):
    """Rounds up or down at random, so that the mean is exact; keeps nothing.

    Attributes:
        name: Of the codec.
        bits: Of each element.
    """

    name: str
    bits: int
    version = 1
    kept = None

    def new_state(self, like: Tensor) -> State:
        """Keeps nothing."""
        return {}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`; what is random is drawn from the round's seed and number, the rank, the bucket and the place."""
        seed = zlib.crc32(struct.pack("<qqq", round_.seed, round_.number, round_.rank), round_.bucket)
        return [
            Payload(
                codec=self.name,
                version=self.version,
                size=right - left,
                parts=kernels.quantise(gradient[left:right], bits=self.bits, block=BLOCK, begin=left, seed=seed),
            )
            for left, right in pairwise(offsets)
        ]

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        packed, scales = check(payload, name=self.name, version=self.version, bits=self.bits, size=out.numel())
        kernels.add_quantised(packed, scales, out, bits=self.bits, block=BLOCK)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Loses it: there is nothing that keeps."""

    def reply(self) -> SegmentCodec:
        """The same: a shard is one more rank, whose rounding is drawn for itself."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(SegmentCodec):
    """Rounds what was kept back and came anew to the nearest level, and keeps the rest back.

    When everything is to be sent it is sent as it is, in float32.

    Attributes:
        name: Of the codec.
        bits: Of each element.
    """

    name: str
    bits: int
    version = 1

    def new_state(self, like: Tensor) -> State:
        """Keeps back what is rounded away."""
        return {RESIDUAL: like.new_zeros(like.numel())}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        residual = state[RESIDUAL]
        residual += gradient
        found = []
        for left, right in pairwise(offsets):
            part = residual[left:right]
            parts: tuple[Tensor, ...]
            if round_.flush:
                parts = (part.clone(),)
                part.zero_()
            else:
                packed, scales = parts = kernels.nearest(part, bits=self.bits, block=BLOCK)
                kernels.add_quantised(packed, -scales, part, bits=self.bits, block=BLOCK)
            found.append(Payload(codec=self.name, version=self.version, size=right - left, parts=parts))
        return found

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        if len(payload.parts) == 1:
            check_frame(payload, name=self.name, version=self.version, size=out.numel())
            [values] = check_kinds(payload, (FLOAT32,))
            if values.numel() != payload.size:
                raise PayloadInvalid(f"a payload of {self.name} has not one value for each element")
            check_finite(payload, values)
            out += values
            return
        packed, scales = check(payload, name=self.name, version=self.version, bits=self.bits, size=out.numel())
        kernels.add_quantised(packed, scales, out, bits=self.bits, block=BLOCK)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Keeps it back again."""
        self.add(payload, state[RESIDUAL][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """The same: the shard keeps back what it rounds away."""
        return self
