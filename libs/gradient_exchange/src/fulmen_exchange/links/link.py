"""The interface of links, which carry payloads between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.codecs.codec import Payload, Round, SegmentCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums of a bucket's segments.

    Attributes:
        replies: Encoded sum of each segment, the same bytes on every rank.
        accepted: For each segment, whether it includes this rank's payload.
        factors: For each segment, the number of ranks divided by the number of ranks whose payloads it includes; empty
            if it includes all.
    """

    replies: Sequence[Payload]
    accepted: Sequence[bool]
    factors: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumSum:
    """A part of a tensor that was summed over the ranks that were on time.

    Attributes:
        begin: First element.
        end: The one after the last.
        accepted: Whether it includes this rank's.
        factor: Number of ranks divided by the number of ranks that it includes.
    """

    begin: int
    end: int
    accepted: bool = True
    factor: float = 1.0


class Link(Protocol):
    """A group of ranks that exchange; all make the same calls in the same order."""

    def begin(self) -> None:
        """Begins a round, before its first call, on every rank. Ranks that join a running exchange start at such a point."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def shards(self) -> int:
        """Number of segments per bucket."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a tensor over the ranks, in place, bit for bit the same on each."""

    def sum_quorum(self, tensor: Tensor) -> Sequence[QuorumSum]:
        """Sums a tensor as `all_reduce` does, but without ranks that are late, where the link has a quorum.

        Returns:
            Its parts in order, which differ between ranks in `accepted` alone.
        """

    def supports(self, codec: SegmentCodec) -> bool:
        """Returns whether the link can sum a codec's payloads; always true for the codec it was made for."""

    def use(self, codec: SegmentCodec) -> Shard | None:
        """Sums payloads of a supported codec from now on, the same on every rank.

        Returns:
            This rank's shard, whose states are part of the rank's; None if the shards are elsewhere.
        """

    def exchange(self, payloads: Mapping[int, Sequence[Payload]], round_: Round) -> dict[int, Sums]:
        """Sums the segments of buckets.

        Args:
            payloads: By bucket index, one payload per shard; the same buckets in the same order on every rank.
            round_: The round; the link fills in the bucket.

        Returns:
            The sums of each bucket.
        """

    @property
    def missed_sums(self) -> int:
        """Number of `all_reduce` sums that do not include this rank's tensor.

        Its contribution is lost for all ranks alike, which keep the same bits. This only happens when a removed rank returns.
        """

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by this rank."""

    @property
    def received_bytes(self) -> int:
        """Bytes received by this rank."""

    @property
    def up_bytes(self) -> int:
        """Bytes that this rank has sent to be summed; half of what a ring sends."""

    @property
    def down_bytes(self) -> int:
        """Bytes of sums that this rank has received; half of what a ring receives."""
