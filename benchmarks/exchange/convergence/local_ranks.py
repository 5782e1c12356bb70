"""Ranks that are threads of one process: what a process group does, without processes and without a wire.

Invariant: one thread computes at a time, so that a group costs what its ranks cost one after another; payloads travel
as bytes, and what a rank would send to the others is counted as `TorchLink` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.aggregator.terms import MAX_RANKS
from fulmen_exchange.codecs.codec import Payload, Round, SegmentCodec
from fulmen_exchange.links.link import QuorumSum, Sums

Result = TypeVar("Result")


class Meeting:
    """Where ranks put what they have for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Computes alone; if this rank fails, the others do not wait for it."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._barrier.abort()
                raise

    def all(self, rank: int, value: Any) -> list[Any]:
        """Gives every rank the values of all, in the order of the ranks; they are not to be changed."""
        self._slots[rank] = value
        self._wait()
        values = list(self._slots)
        self._wait()
        return values

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()


class LocalLink:
    """See `exchange.link.Link`; each rank is the shard of one segment of every bucket."""

    missed_sums = 0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = self.shards = meeting.size
        self._shards: dict[SegmentCodec, Shard] = {}
        self._shard: Shard | None = None
        self.sent_bytes = self.received_bytes = 0
        self.up_bytes = self.down_bytes = 0

    def begin(self) -> None:
        """Ranks neither come nor go."""

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Link`; adds in the order of the ranks, and counts what a ring of ranks sends."""
        first, *others = self._meeting.all(self.rank, tensor.clone())
        tensor.copy_(first)
        for other in others:
            tensor += other
        each_way = (self.size - 1) * tensor.numel() * tensor.element_size() // self.size
        self.sent_bytes += 2 * each_way
        self.received_bytes += 2 * each_way
        self.up_bytes += each_way
        self.down_bytes += each_way

    def sum_quorum(self, tensor: Tensor) -> Sequence[QuorumSum]:
        """See `Link`; all ranks are waited for."""
        self.all_reduce(tensor)
        return (QuorumSum(begin=0, end=tensor.numel()),)

    def supports(self, codec: SegmentCodec) -> bool:
        """Takes payloads of any codec."""
        return True

    def use(self, codec: SegmentCodec) -> Shard:
        """See `Link`; a codec keeps its shard."""
        self._shard = self._shards.setdefault(codec, Shard(codec))
        return self._shard

    def exchange(self, payloads: Mapping[int, Sequence[Payload]], round_: Round) -> dict[int, Sums]:
        """See `Link`; every payload is accepted."""
        assert self._shard is not None
        found = {}
        for bucket, segments in payloads.items():
            sent = self.sent_bytes
            collected = self._all_to_all([wire.encode(payload) for payload in segments])
            self.up_bytes += self.sent_bytes - sent
            received = self.received_bytes
            as_shard = replace(round_, rank=MAX_RANKS + self.rank, bucket=bucket)
            reply = wire.encode(self._shard.reduce(bucket, [wire.decode(data) for data in collected], as_shard))
            replies = self._all_to_all([reply] * self.size)
            self.down_bytes += self.received_bytes - received
            found[bucket] = Sums(replies=[wire.decode(data) for data in replies], accepted=[True] * self.size)
        return found

    def _all_to_all(self, messages: Sequence[bytearray]) -> list[bytearray]:
        """Sends each rank its message, and returns what each has sent to this one."""
        mine = [of_rank[self.rank] for of_rank in self._meeting.all(self.rank, messages)]
        self.sent_bytes += sum(map(len, messages)) - len(messages[self.rank])
        self.received_bytes += sum(map(len, mine)) - len(mine[self.rank])
        return mine


def on_ranks(size: int, work: Callable[[Meeting, int], Result]) -> list[Result]:
    """Does the work of every rank; returns what each has, in order.

    Raises:
        Exception: what the first rank that failed by itself has raised.
    """
    meeting = Meeting(size)

    def alone(rank: int) -> Result:
        with meeting.taking_part():
            return work(meeting, rank)

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as threads:
        calls = [threads.submit(alone, rank) for rank in range(size)]
    errors = [error for error in (call.exception() for call in calls) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [call.result() for call in calls]
