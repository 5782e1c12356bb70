"""What carries payloads between ranks: one port, and an adapter for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.codecs.codec import Payload, Round, SegmentCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What came of the segments of a bucket.

    Attributes:
        replies: The encoded sum of each segment, the same bytes on every rank.
        accepted: For each segment, whether this rank's payload is in it.
    """

    replies: Sequence[Payload]
    accepted: Sequence[bool]


class Link(Protocol):
    """Ranks that exchange; all of them make the same calls in the same order."""

    def begin(self) -> None:
        """Begins a round: before its first call, on every rank. Who joins in mid-run takes part from such a place on."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def shards(self) -> int:
        """Into how many segments a bucket is cut."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a tensor over the ranks, in place; the same bits on each."""

    def supports(self, codec: SegmentCodec) -> bool:
        """Tells whether payloads of a codec can be summed; always, if it is the one that the link was made for."""

    def use(self, codec: SegmentCodec) -> Shard | None:
        """Has payloads of a codec summed from now on; one that it takes, the same on every rank.

        Returns:
            The shard that this rank is, whose states belong to those of the rank; None where shards are elsewhere.
        """

    def exchange(self, payloads: Mapping[int, Sequence[Payload]], round_: Round) -> dict[int, Sums]:
        """Has the segments of buckets summed.

        Args:
            payloads: Of each bucket, by its index, one for each shard; of the same buckets in the same order on every rank.
            round_: The round; of which bucket, the link says itself.

        Returns:
            What came of each bucket.
        """

    @property
    def missed_sums(self) -> int:
        """How many sums of `all_reduce` this rank got that were made without its own tensor, since it began.

        What it had put in is lost to all ranks alike: they go on with the same bits. It is so only after a rank was given
        up and has come back.
        """

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent since it began."""

    @property
    def received_bytes(self) -> int:
        """Bytes that it has received."""
