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

from fulmen_algorithm.exchange.aggregator.effects import Answer, Behind, Chunk, Done, Effect, Replaced, SumDue, Verdict
from fulmen_algorithm.exchange.aggregator.membership import Key
from fulmen_algorithm.exchange.aggregator.rounds import RoundMachine
from fulmen_algorithm.exchange.aggregator.terms import CHUNK_BYTES, SUM, CallTerms, Patience, Terms

TAG = struct.Struct("<qqqq")
CALLS = 2
"""Of every round: a sum that needs all, and one that a quorum may close."""
PATIENCE = Patience(quorum=0.5, least_wait_s=1.0, most_wait_s=4.0, give_up_s=20.0, lease_s=10.0)
WORK = 80
seeds = st.integers(0, 2**32)
WITH_SUM = {Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.LATE}


def terms_of(world_size: int) -> Terms:
    """Returns terms with one bucket, whose payloads may have two chunks."""
    return Terms(
        world_size=world_size, shard=0, shard_count=1, layout_digest="layout", codec="topk", codec_version=1,
        settings_json="{}", segment_sizes=(CHUNK_BYTES // 4,), patience=PATIENCE,
    )  # fmt: skip


@dataclass(kw_only=True)
class Rank:
    """A process that follows the protocol, and what it has learnt."""

    rank: int
    number: int
    epoch: int
    round: int
    call: int = 0
    known: int = 0
    lives: bool = True
    passed: dict[Key, bytes] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return str(self.number)

    @property
    def key(self) -> Key:
        return self.round, self.call

    @property
    def tag(self) -> bytes:
        return TAG.pack(self.rank, self.number, *self.key)

    def chunks(self) -> list[Chunk]:
        """Returns the chunks of the payload that it sends now: two where the codec is asked, one for a sum."""
        needs_all = self.call == 0
        payload = self.tag if needs_all else self.tag + bytes(CHUNK_BYTES)
        terms = CallTerms(
            bucket=0, codec=SUM if needs_all else "topk", codec_version=1, number=self.round, ratio=1.0, seed=0,
            flush=False, total_bytes=len(payload) if needs_all else 0,
        )  # fmt: skip
        parts = [(begin, payload[begin : begin + CHUNK_BYTES]) for begin in range(0, len(payload), CHUNK_BYTES)]
        return [
            Chunk(
                epoch=self.epoch, key=self.key, terms=terms, offset=begin, total_bytes=len(payload), data=part,
                crc32=zlib.crc32(part),
            )
            for begin, part in parts
        ]  # fmt: skip


class Rounds(RuleBasedStateMachine):
    """Ranks, a shard, and a network between them that delays, reorders, repeats, loses and damages."""

    @initialize(world_size=st.sampled_from([1, 2, 3, 3]))
    def begin(self, world_size: int) -> None:
        self.world_size = world_size
        self.now_s = 0.0
        self.machine = RoundMachine(terms_of(world_size))
        self.numbers = itertools.count(1)
        self.ranks: list[Rank] = []
        self.sent: list[tuple[Rank, Chunk]] = []
        self.answers: list[Answer] = []
        self.due: list[SumDue] = []
        self.sums: dict[Key, bytes] = {}
        self.files: dict[int, tuple[SumDue, int]] = {}
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

    @rule(seed=seeds, at_once=st.booleans())
    def the_server_is_started_again(self, seed: int, at_once: bool) -> None:
        """Sums are in its files, of each call the newest; what was under way is lost, and ranks find out by and by."""
        self.all_that_is_under_way_is_lost()
        self.machine = RoundMachine(terms_of(self.world_size))
        newest = max((due.key[0] for due, _ in self.files.values()), default=0)
        kept = {
            due.key: (
                due.terms,
                Done(taken=due.taken, member_count=due.member_count, reply=self.sums[due.key]),
            )
            for due, _ in self.files.values()
            if due.key[0] >= newest - 1
        }
        self.machine.restore(kept, epoch=max((epoch for _, epoch in self.files.values()), default=0))
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
        self.ranks.append(Rank(rank=rank, number=number, epoch=joined.epoch, round=joined.first_round))
        self.do(effects)

    def is_sending(self, rank: Rank) -> bool:
        return any(other is rank and chunk.key == rank.key for other, chunk in self.sent)

    def deliver(self, pick: int, *, keep: bool, damage: bool) -> None:
        """Delivers one of the chunks that are under way."""
        if not self.sent:
            return
        place = pick % len(self.sent)
        rank, chunk = self.sent[place] if keep else self.sent.pop(place)
        if damage:
            chunk = replace(chunk, data=chunk.data[:-1] + bytes([chunk.data[-1] ^ 1]))
        is_stale = chunk.epoch != self.machine.members.epoch
        effects = self.machine.take(rank.rank, rank.incarnation, chunk, self.now_s)
        if is_stale or damage:
            allowed = {Verdict.STALE_EPOCH} if is_stale else {Verdict.STALE_EPOCH, Verdict.BAD_CHECKSUM}
            assert {effect.verdict for effect in effects if isinstance(effect, Answer)} <= allowed
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
        tags = [bytes(payload[: TAG.size]) for payload in due.payloads.values()]
        for (rank, incarnation), tag in zip(due.taken.items(), tags, strict=True):
            assert TAG.unpack(tag) == (rank, int(incarnation), *due.key)
        self.sums[due.key] = b"".join(tags)
        self.files[due.key[1]] = due, self.machine.members.epoch
        self.do(self.machine.summed(due.key, self.sums[due.key], self.now_s))

    def hear(self, answer: Answer) -> None:
        rank = next(each for each in self.ranks if each.incarnation == answer.incarnation)
        if not rank.lives or answer.key != rank.key:
            return
        if answer.verdict in WITH_SUM:
            assert answer.done is not None
            assert answer.done.reply == self.sums[rank.key], "two ranks got different sums"
            inside = self.sums[rank.key].count(rank.tag)
            assert inside == (0 if answer.verdict is Verdict.LATE else 1)
            rank.passed[rank.key] = answer.done.reply
            rank.known = answer.done.member_count
            rank.round, rank.call = (rank.round, 1) if rank.call == 0 else (rank.round + 1, 0)
        elif answer.verdict is Verdict.STALE_EPOCH:
            self.join_again(rank)
        elif answer.verdict is Verdict.BEHIND:
            rank.lives = False
        else:
            assert answer.verdict is Verdict.BAD_CHECKSUM, answer

    def join_again(self, rank: Rank) -> None:
        try:
            joined, effects = self.machine.join(
                rank.rank, rank.incarnation, self.now_s, round_=rank.round, epoch=rank.epoch, known=rank.known
            )
        except (Behind, Replaced):
            rank.lives = False
            return
        rank.epoch = joined.epoch
        self.do(effects)

    def one_of(self, pick: int) -> Rank | None:
        alive = [rank for rank in self.ranks if rank.lives]
        return alive[pick % len(alive)] if alive else None

    def teardown(self) -> None:
        """Whatever has happened: once nothing goes wrong any more, those who live go on."""
        if not hasattr(self, "machine"):
            return
        for rank in set(range(self.world_size)) - {rank.rank for rank in self.ranks if rank.lives}:
            self.join(rank)
        target = max(rank.round for rank in self.ranks) + 2
        for _ in range(60):
            self.now_s += 1.0
            for rank in [rank for rank in self.ranks if rank.lives]:
                self.sent += [(rank, chunk) for chunk in rank.chunks()]
            while self.sent:
                self.deliver(0, keep=False, damage=False)
            while self.due:
                self.add(self.due.pop())
            self.do(self.machine.tick(self.now_s))
            while self.answers:
                self.hear(self.answers.pop(0))
        alive = [rank for rank in self.ranks if rank.lives]
        assert alive
        assert all(rank.round >= target for rank in alive), [(rank.rank, rank.key) for rank in alive]


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    max_examples=40, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
