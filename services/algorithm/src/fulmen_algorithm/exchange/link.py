"""What carries payloads between ranks: one port, and an adapter for each network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fulmen_algorithm.exchange.codec import Payload, Round


class ExchangeFailed(Exception):
    """Ranks cannot go on exchanging; the text says what to do about it."""


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

    def exchange(self, bucket: int, payloads: Sequence[Payload], round_: Round) -> tuple[list[Payload], list[bool]]:
        """Has the segments of a bucket summed.

        Args:
            bucket: Which one.
            payloads: One for each shard.
            round_: The round.

        Returns:
            The encoded sum of each segment, the same bytes on every rank; for each segment, whether this rank's payload is
            in it.
        """

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent since it began."""

    @property
    def received_bytes(self) -> int:
        """Bytes that it has received."""
