"""Deep gradient compression, as published.

Source: Lin et al., arXiv:1712.01887: local gradient clipping, momentum correction, momentum factor masking. The warm-up of
the sparsity belongs to the policies. u and v are momentum and error feedback; the optimiser has no momentum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import CodecEntry, Payload, Round, SegmentCodec, State
from fulmen_exchange.codecs.narrow import StateKind, narrowed
from fulmen_exchange.codecs.sparse import MAX_RATIO, Taken, capped, check, payloads_of, sampled, share_of
from fulmen_exchange.codecs.union import reply_of
from fulmen_exchange.settings import CodecSettings

if TYPE_CHECKING:
    from torch import Tensor

VELOCITY, ACCUMULATED = "velocity", "accumulated"


class DgcSettings(CodecSettings):
    """Settings of `dgc`.

    Attributes:
        ratio: Bytes of float32 per byte sent after the warm-up; 1 to 4096, default 100.
        ratio_down: The same for the sum that is sent back, reached when `ratio` is; the rest stays at the shard. None sends
            everything that ranks have sent, at most every element in bfloat16; 1 to 4096, default None.
        min_threshold: Magnitude below which an element is not sent, whatever the ratio, until a flush; default 0, for none.
        residual: Number format of the residual on the rank, and of its momentum; `bfloat16` needs half the memory and some time, and
            is rounded stochastically without bias; default `float32`.
        momentum: m of the momentum correction; default 0.9.
        nesterov: Whether to correct Nesterov momentum; default False.
        clip: Norm, over the square root of the number of ranks, to which each rank's gradient is clipped before it is
            accumulated; 0 for no clipping; default 1.0.
    """

    sgd_only = True
    holds_momentum = True
    codec: Literal["dgc"] = "dgc"
    ratio: float = Field(default=100.0, ge=1, le=MAX_RATIO)
    residual: StateKind = "float32"
    min_threshold: float = Field(default=0.0, ge=0)
    ratio_down: float | None = Field(default=None, ge=1, le=MAX_RATIO)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    clip: float = Field(default=1.0, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dgc(SegmentCodec):
    """Accumulates corrected momentum and sends its largest elements."""

    momentum: float
    nesterov: bool
    down: SegmentCodec
    local_clip: float | None = None
    min_threshold: float = 0.0
    name = "dgc"
    version = 1
    residual_name = ACCUMULATED

    def new_state(self, like: Tensor) -> State:
        """See `SegmentCodec`: u and v."""
        return {VELOCITY: like.new_zeros(like.numel()), ACCUMULATED: like.new_zeros(like.numel())}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`."""
        velocity, accumulated = state[VELOCITY], state[ACCUMULATED]
        if round_.flush:
            self.correct(state, gradient, 0, gradient)
            taken = kernels.feedback_select(gradient, accumulated, 0.0)
        else:
            taken = self._selected(gradient, velocity, accumulated, round_)
        return payloads_of(self.name, self.version, taken, offsets)

    def _selected(self, gradient: Tensor, velocity: Tensor, accumulated: Tensor, round_: Round) -> Taken:
        share = share_of(round_.own_ratio)
        g, u, v = sampled(share, round_, gradient, velocity, accumulated)
        # In the kernel's order of additions, so that the element at the threshold reaches it.
        after = v + self.momentum * (u + g) + g if self.nesterov else v + (self.momentum * u + g)
        threshold = max(self.min_threshold, kernels.threshold_of(after, share))
        # Only equal magnitudes can be so many; what is then held back keeps its momentum.
        are_many = int((after.abs() >= threshold).sum()) > 1.1 * max(1.0, share * after.numel())
        before = velocity.clone() if are_many else velocity
        taken = kernels.dgc_select(gradient, velocity, accumulated, self.momentum, self.nesterov, threshold)
        taken, held_back = capped(taken, accumulated.numel(), share, round_)
        if held_back is not None:
            places, values = held_back
            accumulated[places] += values
            u, g = before[places], gradient[places]
            velocity[places] = self.momentum * (u + g) if self.nesterov else self.momentum * u + g
        return taken

    def correct(self, state: State, gradient: Tensor, begin: int, out: Tensor) -> None:
        """See `BaseCodec`: writes the growth of v, so that the round is a step of SGD with momentum.

        u is not masked if all of v is sent, since masking is for momentum of gradients that are sent long after; so no momentum is
        lost when a policy flushes.
        """
        velocity = state[VELOCITY][begin : begin + out.numel()]
        kernels.correct(gradient.float().contiguous(), velocity, self.momentum, self.nesterov, out)

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        kernels.add_sparse(*check(payload, name=self.name, version=self.version, size=out.numel()), out)

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """See `SegmentCodec`; the momentum stays masked."""
        self.add(payload, state[ACCUMULATED][begin : begin + payload.size])

    def reply(self) -> SegmentCodec:
        """Returns `union`, or `topk`: the shard may have a residual but no momentum."""
        return self.down


ENTRIES = (
    CodecEntry(
        settings=DgcSettings,
        make=lambda settings: narrowed(
            Dgc(
                momentum=settings.momentum,
                nesterov=settings.nesterov,
                down=reply_of(settings.ratio, settings.ratio_down),
                local_clip=settings.clip or math.inf,
                min_threshold=settings.min_threshold,
            ),
            settings.residual,
        ),
    ),
)
