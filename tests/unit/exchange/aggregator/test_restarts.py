"""What a shard's server knows, and what it lets ranks do, when it is started again with or without its files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fulmen_exchange.aggregator.effects import Effect, PayloadStatus, RankBehind, Response, ResumePoint, SumDue
from fulmen_exchange.aggregator.rounds import RoundMachine
from fulmen_exchange.aggregator.terms import CallTerms
from tests.support.exchange.aggregators import PLAIN, SUMMED, TERMS, chunk, contributors, kept, started


def statuses(effects: list[Effect]) -> list[PayloadStatus]:
    return [effect.status for effect in effects if isinstance(effect, Response)]


def joins_again(
    machine: RoundMachine, rank: int, *, round_: int, call: int, history: str = "of old", now_s: float = 0.0
) -> None:
    """Has a rank join that knew a member besides itself."""
    resume_point = ResumePoint(round=round_, call=call, epoch=1, known=2, history=history)
    machine.join(rank, str(rank), now_s, resume_point)


def waits_in_vain(machine: RoundMachine, rank: int) -> None:
    """Has a rank join that is in round 5, and wait for the others as long as a lease lasts; it goes on then."""
    joins_again(machine, rank, round_=5, call=0)
    joins_again(machine, rank, round_=5, call=0, now_s=TERMS.patience.lease_s / 2)
    machine.tick(TERMS.patience.lease_s)


@pytest.mark.parametrize("first", [0, 1])
def test_a_sum_that_one_rank_has_is_not_made_anew_for_another_by_a_server_that_lost_it(first: int) -> None:
    machine = RoundMachine(TERMS)
    positions = {0: (5, 1), 1: (5, 0)}
    for rank in (first, 1 - first):
        joins_again(machine, rank, round_=positions[rank][0], call=positions[rank][1])

    assert statuses(contributors(machine, 1, (5, 0))) == [PayloadStatus.BEHIND]
    assert contributors(machine, 0, (5, 1)) == []


def test_a_rank_that_comes_after_the_others_have_gone_on_without_its_sums_is_refused() -> None:
    machine = RoundMachine(TERMS)
    waits_in_vain(machine, 1)
    [due] = contributors(machine, 1, (5, 0))
    assert isinstance(due, SumDue)

    with pytest.raises(RankBehind, match="continued to round"):
        joins_again(machine, 0, round_=5, call=1)
    machine.join(0, "another process", 0.0)  # which takes over the weights of rank 1
    assert machine.members.ranks == [0, 1]


def test_a_rank_that_comes_late_to_a_server_that_has_its_files_goes_on() -> None:
    machine = RoundMachine(TERMS)
    machine.restore(kept(0, (4, 0)), epoch=3, history="of old")
    waits_in_vain(machine, 1)
    joins_again(machine, 0, round_=5, call=0)

    assert machine.members.ranks == [0, 1]
    with pytest.raises(RankBehind, match="continued to round"):
        machine.join(2, "2", 0.0, ResumePoint(round=5, epoch=3, known=2, history="another"))


def test_a_server_that_cannot_read_all_of_its_files_takes_in_whoever_comes_before_it_begins() -> None:
    machine = RoundMachine(TERMS)
    machine.restore(kept(0, (4, 0)), epoch=3, history="")
    joins_again(machine, 1, round_=5, call=0)
    joins_again(machine, 0, round_=5, call=1)

    assert statuses(contributors(machine, 1, (5, 0))) == [PayloadStatus.BEHIND]
    with pytest.raises(RankBehind):
        joins_again(machine, 2, round_=5, call=0)


def test_a_member_whose_heartbeat_has_an_old_history_is_told_the_new_one() -> None:
    machine = started(0, 1)
    joined, _ = machine.join(0, "0", 1.0, ResumePoint(round=1, epoch=1, known=2, history="of old"))
    assert joined.history == machine.history


def sums_of(machine: RoundMachine, rank: int, *calls: int, terms: CallTerms = PLAIN) -> list[Effect]:
    return [effect for call in calls for effect in contributors(machine, rank, (1, call), terms=terms)]


def test_sums_are_made_in_order_whoever_is_late_with_one() -> None:
    machine = started(0, 1)
    assert sums_of(machine, 0, 0, 1, 2) == []
    machine.take(1, "1", replace(chunk((1, 0), epoch=machine.members.epoch, terms=PLAIN), crc32=0), 0.0)
    assert sums_of(machine, 1, 1) == []  # the first of rank 1 came damaged, and comes again

    dues = sums_of(machine, 1, 0)
    assert [due.key for due in dues if isinstance(due, SumDue)] == [(1, 0), (1, 1)]
    told = machine.summed((1, 0), SUMMED, 0.0)
    assert {(each.rank, each.key) for each in told if isinstance(each, Response)} == {(0, (1, 0)), (1, (1, 0))}


def test_what_was_sent_ahead_is_sent_again_when_members_change_and_each_is_told() -> None:
    machine = started(0, 1)
    sums_of(machine, 0, 0, 1)
    _, effects = machine.join(2, "2", 0.0)
    assert [(each.rank, each.key) for each in effects if isinstance(each, Response)] == [(0, (1, 0)), (0, (1, 1))]
    assert statuses(effects) == [PayloadStatus.STALE_EPOCH] * 2


def test_sums_are_kept_until_all_members_are_beyond_them() -> None:
    machine = started(0, 1)
    for number in (1, 2):
        for rank in (0, 1):
            contributors(machine, rank, (number, 0))
        machine.summed((number, 0), SUMMED, 0.0)
    contributors(machine, 0, (3, 0))
    assert statuses(contributors(machine, 1, (2, 0))) == [PayloadStatus.DUPLICATE]  # it may not have come
    assert statuses(contributors(machine, 1, (1, 0))) == [PayloadStatus.BEHIND]
