"""Ranks that come and go, runs side by side, and the reducer on top."""

from __future__ import annotations

import asyncio

import pytest
import torch

from fulmen_exchange.errors import ExchangeFailed
from tests.support.exchange.sums import HASTY, SHORT_LEASE_S, alike, exchanged
from tests.support.exchange.world import OTHER_RUN, Join, Site


async def test_one_who_leaves_is_not_waited_for(site: Site, join: Join) -> None:
    members = [await join(rank) for rank in range(2)]
    await exchanged(1, *members)
    waiting = asyncio.create_task(asyncio.to_thread(members[0].exchange, 2))
    await site.until(lambda: site.has_sent(0, 2))
    await asyncio.to_thread(members[1].link.close)
    await waiting

    assert members[0].link.size == 1
    assert site.shard().machine.members.ranks == [0]


async def test_a_process_whose_place_another_has_taken_ends_and_the_other_goes_on(site: Site, join: Join) -> None:
    members = [await join(rank, link=HASTY) for rank in range(2)]
    await exchanged(1, *members)
    replaced = asyncio.create_task(asyncio.to_thread(members[1].exchange, 2))
    await site.until(lambda: site.has_sent(1, 2))

    newer = await join(1, link=HASTY)
    with pytest.raises(ExchangeFailed, match="another process has joined as rank 1"):
        await replaced
    await exchanged(2, members[0])
    assert alike(*await exchanged(3, members[0], newer))


async def test_one_who_joins_begins_with_the_same_round_at_every_shard(site: Site, join: Join) -> None:
    targets = [site.target] * 2
    members = [await join(rank, targets=targets) for rank in range(2)]
    await exchanged(1, *members)
    for member in members:
        member.link.begin()
    one = [torch.ones(1), torch.ones(1)]  # summed by the first shard: the second knows of no second round
    await asyncio.gather(
        *(asyncio.to_thread(member.link.all_reduce, tensor) for member, tensor in zip(members, one, strict=True))
    )
    assert [site.shard(number).machine.round for number in range(2)] == [2, 1]

    joiner = await join(2, targets=targets)
    assert joiner.link.next_round == 3
    assert all(site.shard(number).machine.members.all()[2].first_round == 3 for number in range(2))
    sums = await exchanged(3, *members, joiner)
    assert alike(sums[0], sums[2])


async def test_runs_side_by_side_know_nothing_of_each_other(site: Site, join: Join) -> None:
    ours, theirs = await join(0, of=1), await join(0, of=1, run=OTHER_RUN, codec="dgc")
    await exchanged(1, ours)
    await exchanged(1, theirs)
    await exchanged(2, ours)

    assert site.shard().machine.round == 2
    assert site.shard(run=OTHER_RUN).machine.round == 1
    assert site.shard().machine.members.epoch == site.shard(run=OTHER_RUN).machine.members.epoch == 1


async def test_a_shard_that_all_have_left_is_forgotten_in_time(site: Site, join: Join) -> None:
    member = await join(0, of=1)
    await exchanged(1, member)
    await asyncio.to_thread(member.link.close)
    await site.tick(599.0)
    assert site.shard().machine.round == 1
    await site.tick(1.0)
    assert not site.servicer._shards


async def test_ranks_that_come_back_while_shards_are_forgotten_have_new_ones(
    site: Site, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [site.target] * 2
    before = await join(0, of=1, targets=targets, ratio=100.0)
    await asyncio.to_thread(before.link.close)
    end = site.shard(0).end

    async def end_while_they_come_back() -> None:
        await join(0, of=1, targets=targets, ratio=50.0)
        await end()

    monkeypatch.setattr(site.shard(0), "end", end_while_they_come_back)
    await site.tick(600.0)

    assert [site.shard(number).machine.members.ranks for number in range(2)] == [[0], [0]]


async def test_a_run_that_goes_on_later_may_have_other_settings(site: Site, join: Join) -> None:
    before = await join(0, of=1, ratio=100.0)
    await exchanged(1, before)
    await asyncio.to_thread(before.link.close)

    after = await join(0, of=1, ratio=50.0)
    await exchanged(1, after)
    assert alike(before.got[0], after.got[0])  # nothing is left of what was kept back


async def test_a_member_that_computes_for_long_keeps_its_lease(site: Site, join: Join) -> None:
    members = [await join(rank, link={"lease_s": SHORT_LEASE_S}) for rank in range(2)]
    for _ in range(4):
        await site.tick(SHORT_LEASE_S * 0.9)
        await site.until(lambda: all(m.seen_s == site.clock.now_s for m in site.shard().machine.members.all()))
    await exchanged(1, *members)
    assert members[0].link.size == 2
