"""Shared parts of the quantising codecs: blocks of 512 elements with one scale.

Rounding is either stochastic, which is unbiased and needs no residual, or to nearest, which is biased and has half the
error; what it rounds away stays in the residual (error feedback). The two do not mix: error feedback on an unbiased
quantiser only adds noise (docs/exchange.md).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import (
    FLOAT32,
    INT8,
    RESIDUAL,
    UINT8,
    Payload,
    PayloadInvalid,
    Round,
    SegmentCodec,
    State,
    check_finite,
    check_frame,
    check_kinds,
)

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 512
"""Elements that share a scale."""


def kind_of(bits: int) -> str:
    """Returns the type that carries integers of so many bits: int8, or uint8 bit planes."""
    return INT8 if bits == 8 else UINT8


def packed_count(size: int, bits: int) -> int:
    """Returns how many elements of `kind_of` hold so many integers."""
    return size if bits == 8 else -(-size // 8) * bits


def pack(whole: Tensor, bits: int) -> Tensor:
    """Packs signed integers, int8 [n], like `kernels.quantise`: the lowest bits of 8 neighbours form a byte."""
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
    """Unpacks integers to float32 [n], as many as `like` has."""
    # Scales of 1 leave the integers unchanged.
    whole = like.new_zeros(like.numel())
    kernels.add_quantised(packed, like.new_ones(-(-like.numel() // BLOCK)), whole, bits=bits, block=BLOCK)
    return whole


def check(payload: Payload, *, name: str, version: int, bits: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the parts of a quantised payload: integers and scales.

    Raises:
        PayloadInvalid: if the codec, size or number of bits is wrong, or a scale is negative or not finite.
    """
    check_frame(payload, name=name, version=version, size=size)
    packed, scales = check_kinds(payload, (kind_of(bits), FLOAT32))
    if packed.numel() != packed_count(size, bits) or scales.numel() != -(-size // BLOCK):
        raise PayloadInvalid(
            f"{name}: size of the parts does not match {bits} bits per element and one scale per block"
        )
    # No element may overflow float32 either.
    check_finite(payload, scales * 2 ** (bits - 1))
    if bool((scales < 0).any()):
        raise PayloadInvalid(f"{name}: negative scale")
    return packed, scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Stochastic(SegmentCodec):
    """Rounds stochastically without bias; stateless.

    Attributes:
        name: Name of the codec.
        bits: Bits per element.
    """

    name: str
    bits: int
    version = 1
    residual_name = None

    def new_state(self, like: Tensor) -> State:
        """See `SegmentCodec`: nothing."""
        return {}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`; random numbers depend on the round's seed and number, the rank, the bucket and the index."""
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
        """Drops the payload: there is no residual."""

    def reply(self) -> SegmentCodec:
        """Returns this codec: the shard draws random numbers like one more rank."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(SegmentCodec):
    """Rounds gradient plus residual to the nearest level; the rounding error stays in the residual.

    A flush sends float32.

    Attributes:
        name: Name of the codec.
        bits: Bits per element.
    """

    name: str
    bits: int
    version = 1

    def new_state(self, like: Tensor) -> State:
        """See `SegmentCodec`: the residual."""
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
                raise PayloadInvalid(f"{self.name}: number of values does not match the elements")
            check_finite(payload, values)
            out += values
            return
        packed, scales = check(payload, name=self.name, version=self.version, bits=self.bits, size=out.numel())
        kernels.add_quantised(packed, scales, out, bits=self.bits, block=BLOCK)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """See `SegmentCodec`."""
        self.add(payload, state[RESIDUAL][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """Returns this codec: the shard has a residual of its own."""
        return self
