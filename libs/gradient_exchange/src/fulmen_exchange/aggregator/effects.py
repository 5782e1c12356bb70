"""What comes in to a shard's rounds, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen_exchange.aggregator.membership import Key
from fulmen_exchange.aggregator.staging import StagedPayload
from fulmen_exchange.aggregator.terms import CHUNK_BYTES, CallTerms


class PayloadStatus(StrEnum):
    """What became of a payload; as in `fulmen.algorithm.v1.SegmentStatus`, which explains them."""

    ACCEPTED = "ACCEPTED"
    LATE = "LATE"
    DUPLICATE = "DUPLICATE"
    BAD_CHECKSUM = "BAD_CHECKSUM"
    STALE_EPOCH = "STALE_EPOCH"
    INVALID = "INVALID"
    BEHIND = "BEHIND"


class RankBehind(Exception):
    """A rank asks for a round whose sums are not kept any more, or has others than those who go on; the text says which."""


class RankReplaced(Exception):
    """A process that was a member asks to join, and a newer one has its rank; the text says which rank."""


class StagingFull(Exception):
    """A payload cannot be put together: what the server holds of others leaves too little memory for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a payload of a rank.

    Attributes:
        epoch: In which it was sent.
        key: Of which sum.
        terms: What the rank believes of it.
        offset: Where the data lies in the payload.
        total_bytes: Size of the payload.
        data: The bytes.
        crc32: Of them.
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
    """An encoded sum, as the messages that carry it: they are made once, and are the same for all ranks.

    Attributes:
        size: Its bytes.
        messages: Of its chunks, in order; each ends with what it carries.
    """

    size: int
    messages: tuple[bytes, ...] = field(repr=False)

    def chunks(self) -> Iterator[memoryview]:
        """Returns what the messages carry."""
        for message, begin in zip(self.messages, range(0, self.size, CHUNK_BYTES), strict=True):
            yield memoryview(message)[-min(CHUNK_BYTES, self.size - begin) :]

    def data(self) -> bytes:
        """Returns it in one piece."""
        return b"".join(self.chunks())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedSum:
    """A sum that was made.

    Attributes:
        taken: Incarnations of the ranks whose payloads are in it.
        member_count: Members of whom it was expected.
        reply: It, encoded.
    """

    taken: Mapping[int, str]
    member_count: int
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a rank is told.

    Attributes:
        rank: Who.
        incarnation: Which of its processes.
        key: Of which sum.
        verdict: What became of its payload.
        text: Why, for a person.
        offset: The chunk that is meant.
        done: The sum, which follows.
    """

    rank: int
    incarnation: str
    key: Key
    verdict: PayloadStatus
    text: str = ""
    offset: int = 0
    done: CompletedSum | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SumDue:
    """Payloads that are to be summed now.

    Attributes:
        key: Which sum.
        terms: What the ranks agreed on.
        payloads: By rank, ascending.
        taken: Incarnations of those ranks.
        member_count: Members of whom it was expected.
    """

    key: Key
    terms: CallTerms
    payloads: Mapping[int, StagedPayload] = field(repr=False)
    taken: Mapping[int, str]
    member_count: int


Effect = Response | SumDue


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """What a rank that joins says of itself.

    Attributes:
        round: The round that it is in or begins with; 0 for the next.
        call: How many sums of that round it has; of all rounds before it has all.
        epoch: The epoch that it knew; 0 for none.
        known: How many members it knew; 0 for none.
        history: What it was told of the exchange's; empty for nothing.
    """

    round: int = 0
    call: int = 0
    epoch: int = 0
    known: int = 0
    history: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinResult:
    """What a rank learns when it joins.

    Attributes:
        epoch: Of the membership.
        ranks: Of the members, ascending.
        round: The newest of which anything was sent; 0 before the first.
        first_round: The one that the rank takes part in first.
        history: Names all that was summed so far.
    """

    epoch: int
    ranks: tuple[int, ...]
    round: int
    first_round: int
    history: str


@dataclass(slots=True, kw_only=True)
class RoundRecord:
    """How a round went.

    Attributes:
        began_s: When its first chunk came.
        ended_s: When its last sum was made.
        ranks: Whose payloads were summed.
        late: Who was left out of a sum.
        raw_bytes: Before encoding, per rank.
        sent_bytes: Of all ranks' payloads.
        reply_bytes: Of the sums, per rank.
        payloads: How many were summed.
        sums: How many were made.
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
    """What a shard has done since it began.

    Attributes:
        raw_bytes: Of all payloads that were summed, before encoding.
        received_bytes: Of these payloads.
        sent_bytes: Of sums, counted once for each rank that they went to.
        sums: Sums that were made.
        partial_sums: Of them, without all members.
        bad_checksums: Chunks that were damaged.
    """

    raw_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    sums: int = 0
    partial_sums: int = 0
    bad_checksums: int = 0
