"""A codec whose state is kept in bfloat16: half the memory of residuals and momentum.

What a round leaves is rounded at random (stochastic rounding), without bias: rounded to the nearest, a small gradient that is
added to a large residual would be lost again and again. While a bucket is encoded its state is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import Payload, Round, SegmentCodec, State
from fulmen_exchange.codecs.sparse import seed_of

if TYPE_CHECKING:
    from torch import Tensor

StateKind = Literal["float32", "bfloat16"]
STATES = 1_000_003
"""Added to the number of a round, for random numbers other than those that its codec draws."""


@dataclass(frozen=True, slots=True)
class Narrow(SegmentCodec):
    """Another codec, with its state in bfloat16.

    Attributes:
        wide: The codec.
    """

    wide: SegmentCodec

    @property
    def name(self) -> str:  # type: ignore[override]
        """See `BaseCodec`: payloads are those of the codec."""
        return self.wide.name

    @property
    def version(self) -> int:  # type: ignore[override]
        """See `BaseCodec`."""
        return self.wide.version

    @property
    def residual_name(self) -> str | None:  # type: ignore[override]
        """See `BaseCodec`."""
        return self.wide.residual_name

    @property
    def local_clip(self) -> float | None:  # type: ignore[override]
        """See `SegmentCodec`."""
        return self.wide.local_clip

    def new_state(self, like: Tensor) -> State:
        """See `SegmentCodec`."""
        return {name: tensor.bfloat16() for name, tensor in self.wide.new_state(like).items()}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`; what stays is rounded at random."""
        wide = {name: tensor.float() for name, tensor in state.items()}
        payloads = self.wide.encode(gradient, wide, offsets, round_)
        for place, (name, tensor) in enumerate(wide.items(), start=1):
            kernels.round_at_random(
                tensor, state[name], seed_of(replace(round_, number=round_.number + place * STATES))
            )
        return payloads

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        self.wide.add(payload, out)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """See `SegmentCodec`; rounded to the nearest."""
        wide = {name: tensor[begin : begin + payload.size].float() for name, tensor in state.items()}
        self.wide.credit(payload, wide, 0)
        for name, tensor in wide.items():
            state[name][begin : begin + payload.size] = tensor

    def correct(self, state: State, gradient: Tensor, begin: int, out: Tensor) -> None:
        """See `BaseCodec`; rounded to the nearest."""
        size = out.numel()
        wide = {name: tensor[begin : begin + size].float() for name, tensor in state.items()}
        self.wide.correct(wide, gradient, 0, out)
        for name, tensor in wide.items():
            state[name][begin : begin + size] = tensor

    def reply(self) -> SegmentCodec:
        """See `SegmentCodec`; a shard's residual stays float32."""
        return self.wide.reply()


def narrowed(codec: SegmentCodec, kind: StateKind) -> SegmentCodec:
    """Returns a codec whose state is of a kind."""
    return codec if kind == "float32" else Narrow(codec)
