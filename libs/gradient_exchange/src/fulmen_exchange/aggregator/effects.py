"""Inputs and effects of a shard's round machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen_exchange.aggregator.membership import Key
from fulmen_exchange.aggregator.staging import StagedPayload
from fulmen_exchange.aggregator.terms import CHUNK_BYTES, CallTerms


class PayloadStatus(StrEnum):
    """Status of a payload, as in `fulmen.algorithm.v1.SegmentStatus`."""

    ACCEPTED = "ACCEPTED"
    LATE = "LATE"
    DUPLICATE = "DUPLICATE"
    BAD_CHECKSUM = "BAD_CHECKSUM"
    STALE_EPOCH = "STALE_EPOCH"
    INVALID = "INVALID"
    BEHIND = "BEHIND"


class RankBehind(Exception):
    """A rank requests a round whose sums are no longer retained, or has sums of another history."""


class RankReplaced(Exception):
    """A former member asks to rejoin, but a newer process has its rank."""


class StagingFull(Exception):
    """There is not enough memory to assemble another payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk of a rank's payload.

    Attributes:
        epoch: Epoch in which it was sent.
        key: Round and call of the sum.
        terms: Terms of the sum according to the rank.
        offset: Position in the payload.
        total_bytes: Size of the payload.
        data: Data of the chunk.
        crc32: Checksum of the data.
    """

    epoch: int
    key: Key
    terms: CallTerms
    offset: int
    total_bytes: int
    data: bytes | memoryview = field(repr=False)
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An encoded sum as serialised messages, built once for all ranks.

    Attributes:
        size: Bytes of the sum.
        messages: Messages of its chunks in order; each ends with its data.
    """

    size: int
    messages: tuple[bytes, ...] = field(repr=False)

    def chunks(self) -> Iterator[memoryview]:
        """Yields the data of the messages."""
        for message, begin in zip(self.messages, range(0, self.size, CHUNK_BYTES), strict=True):
            yield memoryview(message)[-min(CHUNK_BYTES, self.size - begin) :]

    def data(self) -> bytes:
        """Returns the sum as contiguous bytes."""
        return b"".join(self.chunks())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedSum:
    """A completed sum.

    Attributes:
        contributors: Incarnations of the ranks whose payloads it includes.
        member_count: Members of which it was expected.
        reply: The encoded sum.
    """

    contributors: Mapping[int, str]
    member_count: int
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response to a rank.

    Attributes:
        rank: The rank.
        incarnation: Its process.
        key: Round and call of the sum.
        status: Status of its payload.
        text: Explanation for users.
        offset: Chunk that the response is about.
        done: The sum, which follows.
    """

    rank: int
    incarnation: str
    key: Key
    status: PayloadStatus
    text: str = ""
    offset: int = 0
    done: CompletedSum | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SumDue:
    """Payloads to be summed now.

    Attributes:
        key: Round and call.
        terms: Terms of the sum.
        payloads: By rank, ascending.
        contributors: Incarnations of those ranks.
        member_count: Members of which the sum was expected.
    """

    key: Key
    terms: CallTerms
    payloads: Mapping[int, StagedPayload] = field(repr=False)
    contributors: Mapping[int, str]
    member_count: int


Effect = Response | SumDue


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Position of a joining rank.

    Attributes:
        round: Its current or first round; 0 for the next one.
        call: Index after the newest sum of that round that it has; it has all of earlier rounds.
        epoch: Last epoch it knew; 0 for none.
        known: Number of members it knew; 0 for none.
        history: Identifier of the exchange it was part of; empty for none.
    """

    round: int = 0
    call: int = 0
    epoch: int = 0
    known: int = 0
    history: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinResult:
    """Result of a join.

    Attributes:
        epoch: Epoch of the membership.
        ranks: Ranks of the members, ascending.
        round: Newest round of which anything was sent; 0 before the first.
        first_round: First round in which the rank participates.
        history: Identifier of all sums so far.
    """

    epoch: int
    ranks: tuple[int, ...]
    round: int
    first_round: int
    history: str


@dataclass(slots=True, kw_only=True)
class RoundRecord:
    """Statistics of a round.

    Attributes:
        began_s: Time of its first chunk.
        ended_s: Time of its last sum.
        ranks: Ranks whose payloads were summed.
        late: Ranks left out of a sum.
        raw_bytes: Bytes before encoding, per rank.
        sent_bytes: Bytes of all ranks' payloads.
        reply_bytes: Bytes of the sums, per rank.
        payloads: Number of payloads summed.
        sums: Number of sums.
    """

    began_s: float
    ended_s: float = 0.0
    ranks: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    raw_bytes: int = 0
    sent_bytes: int = 0
    reply_bytes: int = 0
    payloads: int = 0
    sums: int = 0


@dataclass(slots=True, kw_only=True)
class Totals:
    """Statistics of a shard since it was opened.

    Attributes:
        raw_bytes: Bytes of all summed payloads before encoding.
        received_bytes: Bytes of these payloads.
        sent_bytes: Bytes of sums, once per receiving rank.
        sums: Number of sums.
        partial_sums: Sums without all members.
        bad_checksums: Damaged chunks.
    """

    raw_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    sums: int = 0
    partial_sums: int = 0
    bad_checksums: int = 0
