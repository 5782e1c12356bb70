"""One shard of the sum: adds the ranks' payloads of a segment and encodes the sum for the reply."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import structlog
import torch

from fulmen_exchange.codecs.codec import Payload, PayloadInvalid, Round, SegmentCodec, State

_log = structlog.get_logger()

LARGEST = 1e38
"""Magnitude from which an element of a sum counts as overflowed: encoded, it might be infinite."""


class Shard:
    """Sums segments of every bucket; the residual of a reply is added to the next one.

    Elements of a sum that overflow are left out of it: an infinite one would make its residual NaN, for good.

    Attributes:
        states: State of each bucket summed so far; may be restored.
        overflowed: Number of elements left out.
        seconds: Total time of the sums.
    """

    def __init__(self, codec: SegmentCodec, *, device: torch.device | str = "cpu") -> None:
        self._up = codec
        self._down = codec.reply()
        self._device = device
        self._sums: dict[int, torch.Tensor] = {}
        self.states: dict[int, State] = {}
        self.overflowed = 0
        self.seconds = 0.0

    def reduce(self, bucket: int, payloads: Sequence[Payload], round_: Round) -> Payload:
        """Returns the encoded sum of payloads in the order of their ranks.

        Raises:
            PayloadInvalid: if a payload is malformed or of another size than before; the sum is discarded then.
        """
        began = perf_counter()
        sum_ = self._sums.get(bucket)
        sizes = {payload.size for payload in payloads} | ({sum_.numel()} if sum_ is not None else set())
        if len(sizes) != 1:
            raise PayloadInvalid("segments of different sizes")
        [size] = sizes
        if sum_ is None:
            sum_ = torch.zeros(size, dtype=torch.float32, device=self._device)
        sum_.zero_()
        for payload in payloads:
            self._up.add(payload, sum_)
        self._sums[bucket] = sum_
        self._leave_out_overflows(sum_, bucket, round_)
        if bucket not in self.states:
            self.states[bucket] = self._down.new_state(sum_)
        [reply] = self._down.encode(sum_, self.states[bucket], [0, size], round_)
        self.seconds += perf_counter() - began
        return reply

    def _leave_out_overflows(self, sum_: torch.Tensor, bucket: int, round_: Round) -> None:
        if not sum_.numel():
            return
        smallest, largest = sum_.aminmax()
        # False for NaN as well, which is what infinities of both signs add up to.
        if not (smallest > -LARGEST and largest < LARGEST):
            overflows = ~(sum_.abs() < LARGEST)
            count = int(overflows.sum())
            _log.warning("exchange_sum_overflowed", round=round_.number, bucket=bucket, elements=count)
            self.overflowed += count
            sum_[overflows] = 0.0
