"""The rounds of one shard: which payloads are summed together, the status of each, and who is no longer waited for.

Pure: time is an argument, and effects are returned. Invariants, whatever is delayed, repeated, lost or reordered, and
whoever joins, leaves or dies: all receivers of a sum get the same bytes; a payload reported as accepted is included once,
and one reported as late is not included; a call is summed at most once; messages of another epoch have no effect.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fulmen_exchange.aggregator.checksum import crc32
from fulmen_exchange.aggregator.effects import (
    Chunk,
    CompletedSum,
    Effect,
    JoinResult,
    PayloadStatus,
    RankBehind,
    RankReplaced,
    Reply,
    Response,
    ResumePoint,
    RoundRecord,
    StagingFull,
    SumDue,
    Totals,
)
from fulmen_exchange.aggregator.membership import Key, Member, Membership
from fulmen_exchange.aggregator.staging import BufferPool, Staging
from fulmen_exchange.aggregator.terms import ArrivalTimes, CallTerms, Terms

NEW = ResumePoint()
MAX_CALLS = 2**17
MAX_ROUND = 2**48
MAX_OPEN = 4
"""Payloads of one member that may be assembled at a time, which bounds its memory."""
RECORDED = 64


@dataclass(slots=True, kw_only=True)
class _Call:
    """One sum. `due` is set while it is computed, `done` afterwards; `waiting` has the ranks to respond to."""

    terms: CallTerms
    opened_s: float
    staged: dict[int, Staging] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    due: SumDue | None = None
    done: CompletedSum | None = None


class RoundMachine:
    """The rounds of one shard of one run."""

    def __init__(self, terms: Terms, *, room: Callable[[], float] = lambda: math.inf) -> None:
        """Starts before the first round.

        Args:
            terms: Terms of the run.
            room: Returns how many more bytes may be held.
        """
        patience = terms.patience
        self.terms = terms
        self._room = room
        self.round = 0
        self.history = uuid.uuid4().hex
        self.members = Membership(world_size=terms.world_size, lease_s=patience.lease_s)
        self.arrivals = ArrivalTimes(min_s=patience.min_wait_s, max_s=patience.max_wait_s)
        self.totals = Totals()
        self.removed = 0
        self.records: dict[int, RoundRecord] = {}
        self._calls: dict[Key, _Call] = {}
        self._open: dict[Key, _Call] = {}  # those still receiving payloads
        self._made: Key = (0, 0)  # all earlier sums were made, by this or a former process
        self._pool = BufferPool()
        self._kept_bytes = 0  # of replies that ranks may ask for again
        self._is_restored = False
        self._is_resumed = False
        self._next_round = 1

    @property
    def held_bytes(self) -> int:
        """Memory of incoming and due payloads, of pooled buffers, and of replies."""
        coming = sum(staging.size_bytes for call in self._open.values() for staging in call.staged.values())
        dues = [call.due for call in self._calls.values() if call.due is not None]
        due_bytes = sum(len(each.buffer) for due in dues for each in due.payloads.values())
        return coming + due_bytes + self._pool.size_bytes + self._kept_bytes

    def restore(self, sums: Mapping[Key, tuple[CallTerms, CompletedSum]], *, epoch: int, history: str) -> None:
        """Restores the sums that a former server stored; an empty history means that newer ones may be lost."""
        self.members.epoch = max(self.members.epoch, epoch)
        if not sums:
            return
        for key, (terms, done) in sums.items():
            self._calls[key] = _Call(terms=terms, opened_s=0.0, done=done)
            self._kept_bytes += done.reply.size
        self.round, call = max(sums)
        self._made = self.round, call + 1
        self._next_round = self.round + 1
        self._is_restored = bool(history)
        self.history = history or self.history

    def join(
        self, rank: int, incarnation: str, now_s: float, resume_point: ResumePoint = NEW
    ) -> tuple[JoinResult, list[Effect]]:
        """Adds a rank or renews its lease.

        Args:
            rank: The rank, from 0.
            incarnation: Identifies its process.
            now_s: The time.
            resume_point: What the rank already has.

        Raises:
            RankBehind: if it needs sums that are no longer retained, or has sums of another history.
            RankReplaced: if it was a member before and another process has its rank now.
        """
        # A new process replaces the old one for good; two that alternated would let no sum complete.
        if resume_point.epoch and self.members.is_taken(rank, incarnation):
            raise RankReplaced(f"another process has joined as rank {rank}")
        self._adopt(resume_point, is_member=self.members.get(rank, incarnation) is not None)
        self.members.resume(
            epoch=resume_point.epoch, known=resume_point.known, until_s=now_s + self.terms.patience.lease_s
        )
        first_round = resume_point.round
        if not resume_point.round and self.members.get(rank, incarnation) is None:
            first_round = self.round + 1 if self.members.is_started or self._is_resumed else self._next_round
        changed = self.members.add(Member(rank=rank, incarnation=incarnation, first_round=first_round, seen_s=now_s))
        effects = (self._stale() if changed else []) + self._settle(now_s)
        member = self.members.get(rank, incarnation)
        assert member is not None
        joined = JoinResult(
            epoch=self.members.epoch,
            ranks=tuple(self.members.ranks),
            round=self.round,
            first_round=member.first_round,
            history=self.history,
        )
        return joined, effects

    def _adopt(self, resume_point: ResumePoint, *, is_member: bool) -> None:
        """Learns from a rank's resume point; before the first round, this process may have missed sums."""
        is_foreign = bool(resume_point.history) and resume_point.history != self.history and not is_member
        if is_foreign and (self.members.is_started or self._is_restored):
            raise RankBehind(
                f"the other ranks continued to round {self.round} without this rank, on a server that had lost its sums"
            )
        if self.members.is_started:
            if resume_point.round and resume_point.round < self.round - 1:
                raise RankBehind(f"the exchange is in round {self.round}, this rank in round {resume_point.round}")
            return
        self.round = max(self.round, resume_point.round)
        if resume_point.known:
            self._is_resumed = True
            # Ranks that lack a sum this rank has must not make another one.
            self._made = max(self._made, (resume_point.round, resume_point.call))

    def leave(self, rank: int, incarnation: str, now_s: float) -> list[Effect]:
        """Ends a membership."""
        return self._remove([rank], now_s) if self.members.get(rank, incarnation) is not None else []

    def take(self, rank: int, incarnation: str, chunk: Chunk, now_s: float) -> list[Effect]:
        """Receives a chunk.

        Raises:
            StagingFull: if it begins a payload for which there is no memory.
        """

        def answer(status: PayloadStatus, text: str = "") -> list[Effect]:
            return [
                Response(
                    rank=rank, incarnation=incarnation, key=chunk.key, status=status, text=text, offset=chunk.offset
                )
            ]

        member = self.members.get(rank, incarnation)
        if member is None or chunk.epoch != self.members.epoch:
            # Only for the first chunk, here and below: one response per payload is enough.
            return answer(PayloadStatus.STALE_EPOCH) if chunk.offset == 0 else []
        member.seen_s = now_s
        if problem := self._problem(member, chunk):
            return answer(PayloadStatus.INVALID, problem)
        call = self._calls.get(chunk.key)
        if call is None:
            if chunk.key < self._made:
                return answer(PayloadStatus.BEHIND, f"the others are in round {self.round}")
            call = self._calls[chunk.key] = self._open[chunk.key] = _Call(terms=chunk.terms, opened_s=now_s)
            self._begin(chunk.key, now_s)
        self._note(member, chunk.key)
        if call.done is not None:
            return [self._response(member, chunk.key, call.done, again=True)] if chunk.offset == 0 else []
        call.waiting[rank] = incarnation
        if call.due is not None:
            return []
        # Check only after opening the sum: sums are made in order, and this one must not be skipped.
        if crc32(chunk.data) != chunk.crc32:
            self.totals.bad_checksums += 1
            return answer(PayloadStatus.BAD_CHECKSUM)
        return self._put(call, rank, chunk, now_s)

    def _note(self, member: Member, key: Key) -> None:
        """Records the newest sum that a member has sent for."""
        if key > member.position:
            enters, member.position = key[0] > member.position[0], key
            if enters:
                self._forget()

    def _put(self, call: _Call, rank: int, chunk: Chunk, now_s: float) -> list[Effect]:
        staging = call.staged.get(rank)
        if staging is None:
            staging = call.staged[rank] = self._new_staging(chunk.total_bytes)
        if not staging.put(chunk.offset, chunk.data, chunk.crc32):
            return []
        if not call.terms.needs_all:
            self.arrivals.note(now_s - call.opened_s)
        return self._settle(now_s)

    def _new_staging(self, size: int) -> Staging:
        if size > self._room():
            self._pool.clear()
            if size > self._room():
                raise StagingFull
        return Staging(size, self._pool)

    def summed(self, key: Key, reply: Reply, now_s: float) -> list[Effect]:
        """Completes a due sum; its payloads are no longer read."""
        call = self._calls[key]
        due = call.due
        assert due is not None
        call.due, call.done = (
            None,
            CompletedSum(contributors=due.contributors, member_count=due.member_count, reply=reply),
        )
        self._kept_bytes += reply.size
        self._made = max(self._made, (key[0], key[1] + 1))
        self._count(due, reply, now_s)
        self._pool.max_buffers = MAX_OPEN * len(self.members.ranks)
        for staged in due.payloads.values():
            self._pool.give(staged.buffer)
        waiting = [self.members.get(rank, incarnation) for rank, incarnation in call.waiting.items()]
        call.waiting = {}
        return [self._response(member, key, call.done, again=False) for member in waiting if member is not None]

    def refused(self, key: Key, reasons: Mapping[int, str], now_s: float) -> list[Effect]:
        """Handles payloads that cannot be summed, with reasons by rank: these ranks are removed and the others resend."""
        call = self._calls[key]
        due = call.due
        assert due is not None
        call.due, self._open[key] = None, call
        effects: list[Effect] = [
            Response(rank=rank, incarnation=due.contributors[rank], key=key, status=PayloadStatus.INVALID, text=text)
            for rank, text in reasons.items()
        ]
        for rank in reasons:
            call.waiting.pop(rank, None)
        gone = [rank for rank in reasons if self.members.get(rank, due.contributors[rank]) is not None]
        return effects + self._remove(gone, now_s, also=True)

    def tick(self, now_s: float) -> list[Effect]:
        """Removes members that are silent or delay others, and makes sums without stragglers."""
        expired = self.members.expired(now_s)
        self.removed += len(expired)
        effects = self._remove(expired, now_s)
        self.members.start_if_due(now_s)
        if self.members.is_started:
            straggler_timeout_s = self.terms.patience.straggler_timeout_s
            slow = {
                member.rank
                for key, call in self._open.items()
                if now_s >= call.opened_s + straggler_timeout_s and not self._may_close(key, call, now_s)
                for member in self.members.of_round(key[0])
                if not _is_complete(call, member.rank)
            }
            self.removed += len(slow)
            effects += self._remove(slow, now_s)
        return effects + self._settle(now_s)

    def _problem(self, member: Member, chunk: Chunk) -> str:
        """Returns why a chunk is invalid, before anything is allocated; empty if it is valid."""
        number, index = chunk.key
        if number < member.first_round:
            return f"this rank participates from round {member.first_round}"
        if number > MAX_ROUND or not 0 <= index < MAX_CALLS:
            return f"round must not exceed {MAX_ROUND}, and call must be below {MAX_CALLS}"
        call = self._calls.get(chunk.key)
        if call is not None and (differences := call.terms.differences(chunk.terms)):
            return differences
        staging = call.staged.get(member.rank) if call is not None else None
        if staging is None:
            if problem := chunk.terms.problem(self.terms, chunk.total_bytes):
                return problem
            staged = sum(member.rank in each.staged for each in self._open.values())
            if staged >= MAX_OPEN:
                return f"a rank may send at most {MAX_OPEN} payloads at a time"
            return Staging.shape_problem(chunk.offset, chunk.total_bytes, len(chunk.data))
        return staging.problem(chunk.offset, chunk.total_bytes, len(chunk.data))

    def _may_close(self, key: Key, call: _Call, now_s: float) -> bool:
        expected = self.members.of_round(key[0])
        here = sum(_is_complete(call, member.rank) for member in expected)
        if not here or here == len(expected):
            return bool(here)
        if call.terms.needs_all or now_s < call.opened_s + self.arrivals.deadline_s():
            return False
        return here >= math.ceil(self.terms.patience.quorum * len(expected) - 1e-9)

    def _settle(self, now_s: float) -> list[Effect]:
        """Makes the sums that are due, in order: a rank that has one has all before it."""
        self.members.start_if_due(now_s)
        effects: list[Effect] = []
        for key in sorted(self._open) if self.members.is_started else ():
            if not self._may_close(key, self._open[key], now_s):
                break
            effects.append(self._close(key, self._open.pop(key), now_s))
        return effects

    def _close(self, key: Key, call: _Call, now_s: float) -> SumDue:
        expected = self.members.of_round(key[0])
        inside = [member for member in expected if _is_complete(call, member.rank)]
        for member in expected:
            if member not in inside:
                member.late += 1
                self._record(key[0], now_s).late.add(member.rank)
                self.arrivals.note(now_s - call.opened_s)
        call.due = SumDue(
            key=key,
            terms=call.terms,
            payloads={member.rank: call.staged[member.rank].take() for member in inside},
            contributors={member.rank: member.incarnation for member in inside},
            member_count=len(expected),
        )
        call.staged = {}
        return call.due

    def _remove(self, ranks: Collection[int], now_s: float, *, also: bool = False) -> list[Effect]:
        """Ends memberships; makes unsummed payloads stale if any ended, or if `also` is set."""
        changed = self.members.remove(ranks)
        if not changed and not also:
            return []
        if not self.members.ranks:
            self._is_resumed, self._next_round = False, self.round + 1
            self._pool.clear()
        return self._stale() + self._settle(now_s)

    def _stale(self) -> list[Effect]:
        """Drops unsummed payloads and asks their ranks to rejoin and resend.

        The same applies to former members that wait for a sum being computed, since only members receive it.
        """
        stale: list[tuple[Key, int, str]] = []
        for key, call in list(self._calls.items()):
            if call.done is not None:
                continue
            for rank, incarnation in list(call.waiting.items()):
                if key in self._open or self.members.get(rank, incarnation) is None:
                    del call.waiting[rank]
                    stale.append((key, rank, incarnation))
        for key in self._open:
            del self._calls[key]
        self._open.clear()
        return [
            Response(rank=rank, incarnation=incarnation, key=key, status=PayloadStatus.STALE_EPOCH)
            for key, rank, incarnation in stale
        ]

    def _response(self, member: Member, key: Key, done: CompletedSum, *, again: bool) -> Response:
        inside = done.contributors.get(member.rank) == member.incarnation
        self.totals.sent_bytes += done.reply.size
        status = (PayloadStatus.DUPLICATE if again else PayloadStatus.ACCEPTED) if inside else PayloadStatus.LATE
        return Response(rank=member.rank, incarnation=member.incarnation, key=key, status=status, done=done)

    def _begin(self, key: Key, now_s: float) -> None:
        self.round = max(self.round, key[0])
        self._record(key[0], now_s)
        for number in [number for number in self.records if number <= self.round - RECORDED]:
            del self.records[number]

    def _record(self, number: int, now_s: float) -> RoundRecord:
        return self.records.setdefault(number, RoundRecord(began_s=now_s))

    def _count(self, due: SumDue, reply: Reply, now_s: float) -> None:
        terms, totals = due.terms, self.totals
        raw = terms.total_bytes if terms.is_plain else self.terms.segment_sizes[terms.bucket] * 4
        received = sum(len(payload.data) for payload in due.payloads.values())
        totals.sums += 1
        totals.partial_sums += len(due.payloads) < due.member_count
        totals.raw_bytes += raw * len(due.payloads)
        totals.received_bytes += received
        record = self._record(due.key[0], now_s)
        record.ended_s = now_s
        record.ranks |= due.payloads.keys()
        record.raw_bytes += raw
        record.sent_bytes += received
        record.payloads += len(due.payloads)
        record.sums += 1
        record.reply_bytes += reply.size

    def _forget(self) -> None:
        """Drops sums that all members have: older than the members' rounds and the last two."""
        oldest = min(member.position[0] or member.first_round for member in self.members.all())
        for key, call in list(self._calls.items()):
            if call.done is not None and key[0] < max(oldest, self.round - 1):
                self._kept_bytes -= call.done.reply.size
                del self._calls[key]


def _is_complete(call: _Call, rank: int) -> bool:
    return rank in call.staged and call.staged[rank].is_complete
