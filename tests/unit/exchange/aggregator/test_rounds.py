"""Rounds of a shard under everything that a network and its ranks can do to them."""

from __future__ import annotations

import itertools
import random
import struct
import zlib
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fulmen_exchange.aggregator.effects import (
    Chunk,
    CompletedSum,
    Effect,
    PayloadStatus,
    RankBehind,
    RankReplaced,
    Reply,
    Response,
    ResumePoint,
    SumDue,
)
from fulmen_exchange.aggregator.membership import Key
from fulmen_exchange.aggregator.rounds import RoundMachine
from fulmen_exchange.aggregator.terms import CHUNK_BYTES, SUM, CallTerms, StragglerPolicy, Terms

TAG = struct.Struct("<qqqq")
CALLS = 2
"""Of every round: a sum that needs all, and one that a quorum may close."""
PATIENCE = StragglerPolicy(quorum=0.5, min_wait_s=1.0, max_wait_s=4.0, straggler_timeout_s=20.0, lease_s=10.0)
WORK = 80
seeds = st.integers(0, 2**32)
WITH_SUM = {PayloadStatus.ACCEPTED, PayloadStatus.DUPLICATE, PayloadStatus.LATE}


def terms_of(world_size: int) -> Terms:
    """Returns terms with one bucket, whose payloads may have two chunks."""
    return Terms(
        world_size=world_size, shard=0, shard_count=1, layout_digest="layout", codec="topk", codec_version=1,
        settings_json="{}", segment_sizes=(CHUNK_BYTES // 4,), patience=PATIENCE,
    )  # fmt: skip


def reply_of(data: bytes) -> Reply:
    return Reply(size=len(data), messages=(data,))


@dataclass(kw_only=True)
class Rank:
    """A process that follows the protocol, and what it has learnt; one that is eager sends for all sums of a round."""

    rank: int
    number: int
    epoch: int
    round: int
    is_eager: bool
    known: int = 0
    history: str = ""
    lives: bool = True
    passed: dict[Key, bytes] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return str(self.number)

    @property
    def awaited(self) -> list[Key]:
        keys = [(self.round, call) for call in range(CALLS) if (self.round, call) not in self.passed]
        return keys if self.is_eager else keys[:1]

    @property
    def resume_point(self) -> ResumePoint:
        # Answers may arrive in any order: a sum that this rank has must not be made again.
        call = max([self.awaited[0][1], *(call + 1 for number, call in self.passed if number == self.round)])
        return ResumePoint(round=self.round, call=call, epoch=self.epoch, known=self.known, history=self.history)

    def tag(self, key: Key) -> bytes:
        return TAG.pack(self.rank, self.number, *key)

    def chunks(self) -> list[Chunk]:
        """Returns the chunks of what it sends now: two where the codec is asked, one for a sum."""
        return [chunk for key in self.awaited for chunk in self._chunks(key)]

    def _chunks(self, key: Key) -> list[Chunk]:
        needs_all = key[1] == 0
        payload = self.tag(key) if needs_all else self.tag(key) + bytes(CHUNK_BYTES)
        terms = CallTerms(
            bucket=0, codec=SUM if needs_all else "topk", codec_version=1, number=key[0], ratio=1.0, seed=0,
            flush=False, total_bytes=len(payload) if needs_all else 0,
        )  # fmt: skip
        parts = [(begin, payload[begin : begin + CHUNK_BYTES]) for begin in range(0, len(payload), CHUNK_BYTES)]
        return [
            Chunk(
                epoch=self.epoch, key=key, terms=terms, offset=begin, total_bytes=len(payload), data=part,
                crc32=zlib.crc32(part),
            )
            for begin, part in parts
        ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class File:
    """What a server has kept of the newest sum of a call."""

    due: SumDue
    epoch: int
    history: str


class Rounds(RuleBasedStateMachine):
    """Ranks, a shard, and a network between them that delays, reorders, repeats, loses and damages.

    What eager ranks send arrives in order, as it does on a stream, but for what is repeated or damaged.
    """

    @initialize(world_size=st.sampled_from([1, 2, 3, 3]), are_eager=st.booleans())
    def begin(self, world_size: int, are_eager: bool) -> None:
        self.world_size, self.are_eager = world_size, are_eager
        self.now_s = 0.0
        self.machine = RoundMachine(terms_of(world_size))
        self.has_lost = False
        self.numbers = itertools.count(1)
        self.ranks: list[Rank] = []
        self.sent: list[tuple[Rank, Chunk]] = []
        self.answers: list[Response] = []
        self.due: list[SumDue] = []
        self.sums: dict[Key, bytes] = {}
        self.files: dict[int, File] = {}
        self.epochs: dict[int, tuple[tuple[int, str], ...]] = {}
        for rank in range(world_size):
            self.join(rank)

    # What goes wrong, with some work of the network after each.

    @rule(seed=seeds, rank=st.integers(0, 2))
    def a_rank_joins(self, seed: int, rank: int) -> None:
        self.join(rank)
        self.work(seed)

    @rule(seed=seeds, pick=st.integers(0, 99), says_so=st.booleans())
    def a_rank_goes(self, seed: int, pick: int, says_so: bool) -> None:
        if (rank := self.one_of(pick)) is not None:
            rank.lives = False
            if says_so:
                self.do(self.machine.leave(rank.rank, rank.incarnation, self.now_s))
        self.work(seed)

    @rule(seed=seeds)
    def all_that_was_sent_is_lost(self, seed: int) -> None:
        self.sent.clear()
        self.answers.clear()
        self.work(seed)

    def all_that_is_under_way_is_lost(self) -> None:
        """Chunks, answers and sums; and epochs, of which a server knows those alone that it or a member has kept."""
        for lost in (self.sent, self.answers, self.due, self.epochs):
            lost.clear()

    @rule(seed=seeds, seconds=st.sampled_from([1.0, 5.0, 11.0, 21.0]))
    def time_passes(self, seed: int, seconds: float) -> None:
        self.now_s += seconds
        self.do(self.machine.tick(self.now_s))
        self.work(seed)

    @rule(seed=seeds, at_once=st.booleans(), has_files=st.sampled_from([True, True, False]))
    def the_server_is_started_again(self, seed: int, at_once: bool, has_files: bool) -> None:
        """Sums are in its files, of each call the newest; what was under way is lost, and ranks find out by and by."""
        self.all_that_is_under_way_is_lost()
        self.machine = RoundMachine(terms_of(self.world_size))
        if not has_files:
            self.has_lost = True
            self.files.clear()
            self.sums.clear()
        newest = max((file.due.key[0] for file in self.files.values()), default=0)
        kept = {
            file.due.key: (
                file.due.terms,
                CompletedSum(
                    contributors=file.due.contributors,
                    member_count=file.due.member_count,
                    reply=reply_of(self.sums[file.due.key]),
                ),
            )
            for file in self.files.values()
            if file.due.key[0] >= newest - 1
        }
        last = max(self.files.values(), key=lambda file: file.due.key, default=None)
        self.machine.restore(
            kept,
            epoch=max((file.epoch for file in self.files.values()), default=0),
            history=last.history if last is not None else "",
        )
        chance = random.Random(seed)
        for rank in chance.sample(self.ranks, len(self.ranks)):
            if rank.lives and (at_once or chance.random() < 0.5):
                self.join_again(rank)
        self.work(seed)

    @rule(seed=seeds)
    def nothing_goes_wrong(self, seed: int) -> None:
        self.work(seed)

    def work(self, seed: int) -> None:
        """Sends, delivers and sums in any order, some things twice, some damaged, while a little time passes."""
        chance = random.Random(seed)
        for _ in range(WORK):
            pick, dice = chance.randrange(10**6), chance.random()
            if dice < 0.25:
                rank = self.one_of(pick)
                if rank is not None and (chance.random() < 0.1 or not self.is_sending(rank)):
                    self.sent += [(rank, chunk) for chunk in rank.chunks()]
            elif dice < 0.55:
                self.deliver(pick, keep=chance.random() < 0.1, damage=chance.random() < 0.05)
            elif dice < 0.8 and self.answers:
                place = pick % len(self.answers)
                self.hear(self.answers[place] if chance.random() < 0.1 else self.answers.pop(place))
            elif dice < 0.95 and self.due:
                self.add(self.due.pop(pick % len(self.due)))
            else:
                self.now_s += chance.choice([0.0, 0.2, 0.5])
                self.do(self.machine.tick(self.now_s))

    def join(self, rank: int) -> None:
        number = next(self.numbers)
        joined, effects = self.machine.join(rank, str(number), self.now_s)
        for other in self.ranks:
            if other.rank == rank:
                other.lives = False
        self.ranks.append(
            Rank(
                rank=rank,
                number=number,
                epoch=joined.epoch,
                round=joined.first_round,
                is_eager=self.are_eager,
                history=joined.history,
            )
        )
        self.do(effects)

    def is_sending(self, rank: Rank) -> bool:
        return any(other is rank and chunk.key in rank.awaited for other, chunk in self.sent)

    def deliver(self, pick: int, *, keep: bool, damage: bool) -> None:
        """Delivers one of the chunks that are under way."""
        if not self.sent:
            return
        place = pick % len(self.sent)
        if self.are_eager:
            place = next(at for at, (rank, _) in enumerate(self.sent) if rank is self.sent[place][0])
        rank, chunk = self.sent[place] if keep else self.sent.pop(place)
        if damage:
            chunk = replace(chunk, data=chunk.data[:-1] + bytes([chunk.data[-1] ^ 1]))
        is_stale = chunk.epoch != self.machine.members.epoch
        effects = self.machine.take(rank.rank, rank.incarnation, chunk, self.now_s)
        if is_stale or damage:
            # One whose sum was made is told so, whatever is in it.
            told = {PayloadStatus.BAD_CHECKSUM, PayloadStatus.DUPLICATE, PayloadStatus.LATE, PayloadStatus.BEHIND}
            allowed = {PayloadStatus.STALE_EPOCH} if is_stale else {PayloadStatus.STALE_EPOCH, *told}
            assert {effect.status for effect in effects if isinstance(effect, Response)} <= allowed
            assert not any(isinstance(effect, SumDue) for effect in effects)
        self.do(effects)

    # How it is judged.

    def do(self, effects: list[Effect]) -> None:
        members = tuple((member.rank, member.incarnation) for member in self.machine.members.all())
        assert self.epochs.setdefault(self.machine.members.epoch, members) == members
        for effect in effects:
            if isinstance(effect, SumDue):
                self.due.append(effect)
            else:
                self.answers.append(effect)

    def add(self, due: SumDue) -> None:
        """Sums by putting the tags one after another: who is in it, and how often, can be read from that."""
        assert due.key not in self.sums, "a call was summed twice"
        assert list(due.payloads) == sorted(due.payloads)
        assert due.key[1] != 0 or len(due.payloads) == due.member_count, "a sum that needs all was made without some"
        tags = [bytes(payload.data[: TAG.size]) for payload in due.payloads.values()]
        for (rank, incarnation), tag in zip(due.contributors.items(), tags, strict=True):
            assert TAG.unpack(tag) == (rank, int(incarnation), *due.key)
        self.check_alike([rank for rank in self.ranks if rank.incarnation in due.contributors.values()])
        self.sums[due.key] = b"".join(tags)
        self.files[due.key[1]] = File(due=due, epoch=self.machine.members.epoch, history=self.machine.history)
        self.do(self.machine.summed(due.key, reply_of(self.sums[due.key]), self.now_s))

    def check_alike(self, ranks: list[Rank]) -> None:
        """Whoever goes on together has had the same sums, whatever a server has forgotten."""
        for first, second in itertools.combinations(ranks, 2):
            both = first.passed.keys() & second.passed.keys()
            assert all(first.passed[key] == second.passed[key] for key in both), "ranks have diverged"

    def hear(self, answer: Response) -> None:
        rank = next(each for each in self.ranks if each.incarnation == answer.incarnation)
        if not rank.lives or answer.key not in rank.awaited:
            return
        if answer.status in WITH_SUM:
            assert answer.done is not None
            sum_ = answer.done.reply.data()
            assert sum_ == self.sums[answer.key], "two ranks got different sums"
            inside = sum_.count(rank.tag(answer.key))
            assert inside == (0 if answer.status is PayloadStatus.LATE else 1)
            rank.passed[answer.key] = sum_
            rank.known = answer.done.member_count
            rank.round += not rank.awaited
        elif answer.status is PayloadStatus.STALE_EPOCH:
            self.join_again(rank)
        elif answer.status is PayloadStatus.BEHIND:
            rank.lives = False
        else:
            assert answer.status is PayloadStatus.BAD_CHECKSUM, answer

    def join_again(self, rank: Rank) -> None:
        try:
            joined, effects = self.machine.join(rank.rank, rank.incarnation, self.now_s, rank.resume_point)
        except (RankBehind, RankReplaced):
            rank.lives = False
            return
        rank.epoch, rank.history = joined.epoch, joined.history
        self.do(effects)

    def one_of(self, pick: int) -> Rank | None:
        alive = [rank for rank in self.ranks if rank.lives]
        return alive[pick % len(alive)] if alive else None

    def teardown(self) -> None:
        """Whatever has happened: once nothing goes wrong any more, those who live go on.

        Where sums were lost with a server, those who lack one are told so, and are started again.
        """
        if not hasattr(self, "machine"):
            return
        self.start_again()
        target = max(rank.round for rank in self.ranks) + 2
        for _ in range(60):
            self.now_s += 1.0
            for rank in [rank for rank in self.ranks if rank.lives]:
                self.sent += [(rank, chunk) for chunk in rank.chunks()]
            while self.sent:
                self.deliver(0, keep=False, damage=False)
            while self.due:
                self.add(self.due.pop(0))
            self.do(self.machine.tick(self.now_s))
            while self.answers:
                self.hear(self.answers.pop(0))
            if self.has_lost:
                self.start_again()
        alive = [rank for rank in self.ranks if rank.lives]
        assert alive
        assert all(rank.round >= target for rank in alive), [(rank.rank, rank.awaited) for rank in alive]

    def start_again(self) -> None:
        for rank in sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks if rank.lives}):
            self.join(rank)


TestRounds = Rounds.TestCase
TestRounds.settings = settings(stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
