"""A link over `torch.distributed`: each rank is the shard of one segment of every bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.aggregator.terms import MAX_RANKS
from fulmen_exchange.codecs.codec import Payload, Round, SegmentCodec
from fulmen_exchange.links.link import QuorumSum, Sums
from fulmen_exchange.ranks import Ranks

SMALL_BYTES = 16 * 1024
"""Tensors up to this size are sent to all ranks, which compute the sum themselves."""


class TorchLink:
    """Ranks of one process group; see `Link`."""

    missed_sums = 0

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._shards: dict[SegmentCodec, Shard] = {}
        self._shard: Shard | None = None
        self.sent_bytes = 0
        self.received_bytes = 0
        self.up_bytes = 0
        self.down_bytes = 0

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
        """One per rank."""
        return self._ranks.world_size

    def begin(self) -> None:
        """Does nothing: ranks of a process group neither join nor leave."""

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Link`; counts the traffic of a ring, 2 (N - 1) / N of the tensor each way."""
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes <= SMALL_BYTES and tensor.device.type == "cpu":
            self._sum_small(tensor)
            return
        self._ranks.sum(tensor)
        each_way = (self.size - 1) * size_bytes // self.size
        self.sent_bytes += 2 * each_way
        self.received_bytes += 2 * each_way
        self.up_bytes += each_way
        self.down_bytes += each_way

    def sum_quorum(self, tensor: Tensor) -> Sequence[QuorumSum]:
        """See `Link`: all ranks are waited for."""
        self.all_reduce(tensor)
        return (QuorumSum(begin=0, end=tensor.numel()),)

    def _sum_small(self, tensor: Tensor) -> None:
        """Sends a tensor to all ranks: one latency, where a ring takes 2 (N - 1)."""
        of_ranks = [torch.empty_like(tensor) for _ in range(self.size)]
        self._swap([tensor] * self.size, of_ranks)
        first, *others = of_ranks
        tensor.copy_(first)
        for other in others:
            tensor += other

    def supports(self, codec: SegmentCodec) -> bool:
        """Supports every codec."""
        return True

    def use(self, codec: SegmentCodec) -> Shard:
        """See `Link`; each codec has its own shard."""
        if codec not in self._shards:
            self._shards[codec] = Shard(codec, device=self._ranks.device)
        self._shard = self._shards[codec]
        return self._shard

    def exchange(self, payloads: Mapping[int, Sequence[Payload]], round_: Round) -> dict[int, Sums]:
        """See `Link`; every payload is accepted. All buckets travel together to save latency."""
        if self._shard is None:
            raise AssertionError("use() must be called before exchange()")
        outgoing = [[wire.encode(of_bucket[shard]) for of_bucket in payloads.values()] for shard in range(self.size)]
        sent = self.sent_bytes
        of_ranks = self._all_to_all(outgoing)
        self.up_bytes += self.sent_bytes - sent
        replies = []
        for bucket, messages in zip(payloads, zip(*of_ranks, strict=True), strict=True):
            mine = [wire.decode(data, device=self._ranks.device) for data in messages]
            as_shard = replace(round_, rank=MAX_RANKS + self.rank, bucket=bucket, ratio_factor=1.0)
            replies.append(wire.encode(self._shard.reduce(bucket, mine, as_shard)))
        received = self.received_bytes
        of_shards = self._all_to_all([replies] * self.size)
        self.down_bytes += self.received_bytes - received
        return {
            bucket: Sums(
                replies=[wire.decode(data, device=self._ranks.device) for data in messages],
                accepted=[True] * self.size,
            )
            for bucket, messages in zip(payloads, zip(*of_shards, strict=True), strict=True)
        }

    def _all_to_all(self, outgoing: Sequence[Sequence[bytearray]]) -> list[list[memoryview]]:
        """Sends each rank its messages; returns what each has sent to this one, equally many from each."""
        device, count = self._ranks.device, len(outgoing[0])
        sizes = torch.empty(self.size, count, dtype=torch.int64, device=device)
        self._swap([torch.tensor([len(one) for one in each], device=device) for each in outgoing], list(sizes))
        joined = [torch.frombuffer(bytearray().join(each), dtype=torch.uint8).to(device) for each in outgoing]
        incoming = [torch.empty(int(each.sum()), dtype=torch.uint8, device=device) for each in sizes]
        self._swap(joined, incoming)
        return [_split(data.cpu(), each.tolist()) for data, each in zip(incoming, sizes, strict=True)]

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Sends a tensor to each rank and receives one from each."""
        group, own = self._ranks.group, self.rank
        incoming[own].copy_(outgoing[own])
        calls = []
        for other in range(self.size):
            if other != own:
                # Post receives first: Gloo reaches half the bandwidth if a message arrives before its receive.
                calls.append(dist.P2POp(dist.irecv, incoming[other], group=group, group_peer=other))
                calls.append(dist.P2POp(dist.isend, outgoing[other], group=group, group_peer=other))
                self.sent_bytes += outgoing[other].numel() * outgoing[other].element_size()
                self.received_bytes += incoming[other].numel() * incoming[other].element_size()
        if calls:
            self._ranks.run(lambda: _complete(calls))


def _complete(calls: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def _split(data: Tensor, sizes: Sequence[int]) -> list[memoryview]:
    """Splits bytes into messages of the given sizes."""
    view, ends = data.numpy().data, list(accumulate(sizes, initial=0))
    return [view[begin:end] for begin, end in pairwise(ends)]
