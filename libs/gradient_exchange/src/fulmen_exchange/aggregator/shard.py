"""One shard of the sum: adds what the ranks have sent of a segment, and encodes the sum for the way back."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from fulmen_exchange.codecs.codec import Payload, PayloadInvalid, Round, SegmentCodec, State


class Shard:
    """Sums segments of every bucket; what a reply leaves out is kept back for the next one.

    Attributes:
        states: Of each bucket that was summed; may be restored before.
        seconds: That sums have taken.
    """

    def __init__(self, codec: SegmentCodec, *, device: torch.device | str = "cpu") -> None:
        self._up = codec
        self._down = codec.reply()
        self._device = device
        self._sums: dict[int, torch.Tensor] = {}
        self.states: dict[int, State] = {}
        self.seconds = 0.0

    def reduce(self, bucket: int, payloads: Sequence[Payload], round_: Round) -> Payload:
        """Returns the encoded sum of the payloads, which are in the order of their ranks.

        Raises:
            PayloadInvalid: if one of them is not what the codec makes, or of another size than before; the sum is not sent
                then, and nothing is kept of it.
        """
        began = perf_counter()
        sum_ = self._sums.get(bucket)
        sizes = {payload.size for payload in payloads} | ({sum_.numel()} if sum_ is not None else set())
        if len(sizes) != 1:
            raise PayloadInvalid("ranks sent segments of different sizes")
        [size] = sizes
        if sum_ is None:
            sum_ = torch.zeros(size, dtype=torch.float32, device=self._device)
        sum_.zero_()
        for payload in payloads:
            self._up.add(payload, sum_)
        self._sums[bucket] = sum_
        if bucket not in self.states:
            self.states[bucket] = self._down.new_state(sum_)
        [reply] = self._down.encode(sum_, self.states[bucket], [0, size], round_)
        self.seconds += perf_counter() - began
        return reply
