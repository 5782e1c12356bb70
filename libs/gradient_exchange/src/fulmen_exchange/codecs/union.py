"""The sum of what ranks have sent, whole: the way down of the sparse codecs.

Sources: every worker applies all that any worker has sent (arXiv:1712.01887, algorithm 4; arXiv:2508.15706, algorithm 1).
The sum is not zero where any rank has sent an element, so nothing is chosen and nothing is kept back. Values are rounded
to bfloat16, to the nearest. A segment whose places would take more bytes than the rest of it is sent without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fulmen_exchange import kernels
from fulmen_exchange.codecs.codec import (
    BFLOAT16,
    Payload,
    PayloadInvalid,
    Round,
    SegmentCodec,
    State,
    check_finite,
    check_frame,
    check_kinds,
)
from fulmen_exchange.codecs.sparse import VALUE_BYTES, Feedback, check, payloads_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Union(SegmentCodec):
    """Sends every element that is not zero; stateless."""

    name = "union"
    version = 1
    residual_name = None

    def new_state(self, like: Tensor) -> State:
        """See `SegmentCodec`: nothing."""
        return {}

    def encode(self, gradient: Tensor, state: State, offsets: Sequence[int], round_: Round) -> list[Payload]:
        """See `SegmentCodec`; the same in every round."""
        sparse = payloads_of(self.name, self.version, kernels.nonzero_select(gradient), offsets)
        return [
            payload if payload.nbytes < VALUE_BYTES * payload.size else self._dense(gradient[left:right])
            for payload, (left, right) in zip(sparse, pairwise(offsets), strict=True)
        ]

    def _dense(self, values: Tensor) -> Payload:
        return Payload(codec=self.name, version=self.version, size=values.numel(), parts=(values.bfloat16(),))

    def add(self, payload: Payload, out: Tensor) -> None:
        """See `SegmentCodec`."""
        if len(payload.parts) != 1:
            kernels.add_sparse(*check(payload, name=self.name, version=self.version, size=out.numel()), out)
            return
        check_frame(payload, name=self.name, version=self.version, size=out.numel())
        [values] = check_kinds(payload, (BFLOAT16,))
        if values.numel() != payload.size:
            raise PayloadInvalid(f"{self.name}: number of values does not match the elements")
        check_finite(payload, values)
        out += values

    def credit(self, payload: Payload, state: State, begin: int) -> None:
        """Drops the payload: sums are not sent up."""

    def reply(self) -> SegmentCodec:
        """Returns this codec."""
        return self


def reply_of(ratio: float, ratio_down: float | None, *, exact: bool = False) -> SegmentCodec:
    """Returns the way down of a sparse codec.

    Args:
        ratio: Its ratio.
        ratio_down: The ratio of the way down, which grows with the round's, with a residual at the shard; None for the union.
        exact: See `Feedback`.
    """
    return Union() if ratio_down is None else Feedback(name="topk", exact=exact, scale=ratio_down / ratio)
