"""Ranks of one process group: each is the shard of one segment of every bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fulmen_algorithm.exchange import wire
from fulmen_algorithm.exchange.aggregator.terms import MAX_RANKS
from fulmen_algorithm.exchange.codec import Payload, Round, SegmentCodec
from fulmen_algorithm.exchange.shard import Shard
from fulmen_algorithm.training.parallel import Ranks


class TorchLink:
    """See `exchange.link.Link`."""

    def __init__(self, ranks: Ranks, codec: SegmentCodec | None) -> None:
        """Makes it; None for a codec whose sums need no shard."""
        self._ranks = ranks
        self._shard = Shard(codec, device=ranks.device) if codec is not None else None
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def rank(self) -> int:
        """See `Link`."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """See `Link`."""
        return self._ranks.world_size

    @property
    def shards(self) -> int:
        """One on each rank."""
        return self._ranks.world_size

    @property
    def shard(self) -> Shard | None:
        """The shard of this rank."""
        return self._shard

    def begin(self) -> None:
        """Ranks of a process group neither come nor go."""

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Link`; what a ring of ranks sends is counted: 2 (N - 1) / N of the tensor each way."""
        self._ranks.sum(tensor)
        moved = 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size
        self.sent_bytes += moved
        self.received_bytes += moved

    def exchange(self, bucket: int, payloads: Sequence[Payload], round_: Round) -> tuple[list[Payload], list[bool]]:
        """See `Link`; every payload is accepted."""
        if self._shard is None:
            raise AssertionError("this codec has no segments")
        collected = self._all_to_all([wire.encode(payload) for payload in payloads])
        mine = [wire.decode(data, device=self._ranks.device) for data in collected]
        as_shard = replace(round_, rank=MAX_RANKS + self.rank)
        reply = wire.encode(self._shard.reduce(bucket, mine, as_shard))
        replies = self._all_to_all([reply] * self.size)
        return [wire.decode(data, device=self._ranks.device) for data in replies], [True] * self.size

    def _all_to_all(self, messages: Sequence[bytearray]) -> list[bytearray]:
        """Sends each rank its message, and returns what each has sent to this one."""
        group, device, own = self._ranks.group, self._ranks.device, self.rank
        if group is None:
            return list(messages)
        table = torch.zeros(self.size, self.size, dtype=torch.int64, device=device)
        table[own] = torch.tensor([len(message) for message in messages], device=device)
        dist.all_reduce(table, group=group)
        sizes = table[:, own].tolist()
        incoming = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        outgoing = [torch.frombuffer(message, dtype=torch.uint8).to(device) for message in messages]
        calls = []
        for other in range(self.size):
            if other != own:
                calls.append(dist.P2POp(dist.isend, outgoing[other], other, group=group))
                calls.append(dist.P2POp(dist.irecv, incoming[other], other, group=group))
                self.sent_bytes += outgoing[other].numel()
                self.received_bytes += incoming[other].numel()
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        incoming[own] = outgoing[own]
        return [bytearray(tensor.cpu().numpy().tobytes()) for tensor in incoming]
