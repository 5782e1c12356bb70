"""What becomes of a round when ranks die, are slow, come later or differ, and when the server is started again."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_exchange.aggregator.terms import CHUNK_BYTES
from fulmen_exchange.codecs.codec import Payload, Round
from fulmen_exchange.errors import ExchangeFailed
from tests.support.exchange.sums import HASTY, SHORT_LEASE_S, alike, exchanged, expected
from tests.support.exchange.world import Join, Member, Site, gradient_of, running

QUORUM = {"quorum": 0.5, "max_wait_s": 30.0}


async def test_a_round_closes_with_a_quorum_when_a_member_dies_in_it(site: Site, join: Join) -> None:
    first, second = await join(0, link=QUORUM), await join(1, link=QUORUM)
    waiting = asyncio.create_task(asyncio.to_thread(first.exchange, 1))
    await site.until(lambda: site.has_sent(0, 1))
    await asyncio.to_thread(second.link.kill)
    await site.tick(29.0)
    assert not waiting.done()

    await site.tick(1.0)
    sum_ = await waiting

    assert alike(sum_, (await _alone(join))[0])
    assert first.accepted == [[True]]
    assert site.shard().machine.totals.partial_sums == 1


async def _alone(join: Join) -> list[Tensor]:
    """Returns the sum of rank 0 alone, from a server of its own."""
    async with running(Site()) as other:
        member = await join(0, of=1, targets=[other.target])
        sums = await exchanged(1, member)
        await asyncio.to_thread(member.link.close)
        assert not other.shard().machine.members.ranks
    return sums


async def test_a_round_that_needs_all_is_repeated_without_a_member_whose_lease_has_ended(
    site: Site, join: Join
) -> None:
    first, second = [await join(rank, link={"lease_s": SHORT_LEASE_S}) for rank in range(2)]
    await exchanged(1, first, second)
    waiting = asyncio.create_task(asyncio.to_thread(first.exchange, 2))
    await site.until(lambda: site.has_sent(0, 2))
    epoch = site.shard().machine.members.epoch
    await asyncio.to_thread(second.link.kill)

    await site.tick(SHORT_LEASE_S * 0.6)
    await site.until(lambda: site.shard().machine.members.all()[0].seen_s == site.clock.now_s)  # its heartbeat
    assert not waiting.done()
    await site.tick(SHORT_LEASE_S * 0.6)
    await waiting

    assert first.link.size == 1
    assert first.accepted == [[True], [True]]
    assert site.shard().machine.members.epoch == epoch + 1
    assert site.shard().machine.removed == 1


async def test_a_slow_member_is_late_gets_the_sum_and_loses_nothing(site: Site, join: Join) -> None:
    fast, slow = await join(0, link=QUORUM), await join(1, link=QUORUM)
    waiting = asyncio.create_task(asyncio.to_thread(fast.exchange, 1))
    await site.until(lambda: site.has_sent(0, 1))
    await site.tick(30.0)
    await waiting

    await exchanged(1, slow)
    await exchanged(2, fast, slow)

    assert slow.accepted == [[False], [True]]
    assert all(alike(ours, theirs) for ours, theirs in zip(fast.got, slow.got, strict=True))
    size = fast.layout.size_of(0)
    given = sum((gradient_of(rank, number, size) for rank in (0, 1) for number in (1, 2)), torch.zeros(size))
    kept = fast.state["residual"] + slow.state["residual"] + _kept_by(site)
    torch.testing.assert_close(sum(fast.got, torch.zeros(size)) + kept, given, rtol=1e-4, atol=1e-4)


def _kept_by(site: Site) -> Tensor:
    shard = site.shard()._sums._shard
    assert shard is not None
    return shard.states[0]["residual"]


async def test_a_member_whose_sums_are_not_kept_any_more_is_told_what_to_do(site: Site, join: Join) -> None:
    fast, slow = await join(0, link=QUORUM), await join(1, link=QUORUM)
    for number in (1, 2, 3):
        waiting = asyncio.create_task(asyncio.to_thread(fast.exchange, number))
        await site.until(lambda wanted=number: site.has_sent(0, wanted))  # type: ignore[misc]
        await site.tick(30.0)
        await waiting

    with pytest.raises(ExchangeFailed, match="Restart it from a newer checkpoint"):
        await exchanged(1, slow)


async def test_a_call_that_nobody_else_makes_ends_with_its_deadline(join: Join, site: Site) -> None:
    alone = await join(0, link={"max_wait_s": 0.2, "straggler_timeout_s": 0.3, "deadline_s": 2.5})
    with pytest.raises(ExchangeFailed, match=r"within 2\.5 s in round 1, call 0"):
        await exchanged(1, alone)


async def test_one_who_joins_in_mid_run_takes_part_from_the_next_round_on(site: Site, join: Join) -> None:
    members = [await join(rank) for rank in range(2)]
    await exchanged(1, *members)
    waiting = asyncio.create_task(asyncio.to_thread(members[0].exchange, 2))
    await site.until(lambda: site.has_sent(0, 2))

    joiner = await join(2)
    assert joiner.link.next_round == 3
    await exchanged(2, members[1])
    await waiting
    assert members[0].link.size == 2

    sums = await exchanged(3, *members, joiner)
    assert alike(sums[0], sums[2])
    assert [member.link.size for member in (*members, joiner)] == [3, 3, 3]
    assert site.shard().machine.records[3].ranks == {0, 1, 2}


class Altered(FulmenChannel):
    """A channel whose chunks go through a function first."""

    def __init__(self, inner: FulmenChannel, alter: Callable[[pb.GradientChunk], Awaitable[None]]) -> None:
        self._inner = inner
        self._alter = alter

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._inner.unary_unary(method, *args, **kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        make = self._inner.stream_stream(method, *args, **kwargs)

        def invoke() -> Any:
            stream = make()
            write = stream.write

            async def altered(message: bytes | pb.ExchangeRequest) -> None:
                if isinstance(message, bytes):
                    message = pb.ExchangeRequest.FromString(message)
                    await self._alter(message.chunk)
                await write(message)

            stream.write = altered
            return stream

        return invoke


async def test_a_slow_upload_is_cut_off_when_the_sum_is_made_without_it(site: Site, join: Join) -> None:
    goes_on = threading.Event()

    async def hold(chunk: pb.GradientChunk) -> None:
        if chunk.offset_bytes:
            await asyncio.to_thread(goes_on.wait, 20.0)

    rows = 3 * CHUNK_BYTES // 16  # at a ratio of 4 a byte for each element: three chunks
    fast = await join(0, rows=rows, link=QUORUM)
    slow = await join(1, rows=rows, link=QUORUM, connect=lambda target: Altered(open_channel(target), hold))
    both = asyncio.gather(*(asyncio.to_thread(member.exchange, 1) for member in (fast, slow)))
    await site.until(lambda: site.has_sent(1, 1) and bool(site.shard().machine.arrivals._offsets_s))
    await site.tick(30.0)
    await site.until(lambda: not any(each.is_wanted for each in slow.link._shards[0]._awaited.values()))  # it knows
    goes_on.set()
    sums = await both

    assert alike(*sums)
    assert (fast.accepted, slow.accepted) == ([[True]], [[False]])
    assert slow.link.sent_bytes <= 2 * CHUNK_BYTES


class Unruly(FulmenChannel):
    """A channel that brings what is sent late, some of it twice, and chunks of a payload in another order."""

    def __init__(self, inner: FulmenChannel, chance: random.Random) -> None:
        self._inner = inner
        self._chance = chance
        self.unary_unary: Any = inner.unary_unary

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        make = self._inner.stream_stream(method, *args, **kwargs)
        return lambda: self._unruly(make())

    def _unruly(self, stream: Any) -> Any:
        write, read, held = stream.write, stream.read, list[bytes]()

        async def unruly(message: bytes | pb.ExchangeRequest) -> None:
            await asyncio.sleep(self._chance.uniform(0.0, 0.002))
            if not isinstance(message, bytes):
                await write(message)
                return
            chunk = pb.ExchangeRequest.FromString(message).chunk
            held.append(message)
            is_last = chunk.offset_bytes + len(chunk.data) == chunk.total_bytes
            if is_last or self._chance.random() < 0.4:
                self._chance.shuffle(held)
                for each in [*held, *self._chance.choices(held, k=self._chance.randrange(2))]:
                    await write(each)
                held.clear()

        async def late() -> Any:
            await asyncio.sleep(self._chance.uniform(0.0, 0.002))
            return await read()

        stream.write, stream.read = unruly, late
        return stream


@pytest.mark.parametrize("seed", range(3))
async def test_messages_that_are_late_repeated_and_in_another_order_change_nothing(
    seed: int, site: Site, join: Join
) -> None:
    rows = 3 * CHUNK_BYTES // 16 + 5  # at a ratio of 4 three chunks, and a rest
    chance = random.Random(seed)
    members = [await join(rank, rows=rows, connect=lambda at: Unruly(open_channel(at), chance)) for rank in range(2)]
    async with running(Site()) as other:
        calm = [await join(rank, rows=rows, targets=[other.target]) for rank in range(2)]
        for number in (1, 2, 3):
            sums = await exchanged(number, *members)
            wanted = await exchanged(number, *calm)
            assert all(alike(sum_, wanted[0]) for sum_ in sums)
        for member in calm:
            await asyncio.to_thread(member.link.kill)
    assert all(member.accepted == [[True]] * 3 for member in members)


async def test_a_damaged_chunk_is_refused_and_sent_again(site: Site, join: Join) -> None:
    to_damage: list[int] = []

    async def damage(chunk: pb.GradientChunk) -> None:
        if to_damage:
            chunk.data = chunk.data[:-1] + bytes([chunk.data[-1] ^ to_damage.pop()])

    members = [await join(0, connect=lambda target: Altered(open_channel(target), damage)), await join(1)]
    await exchanged(1, *members)
    to_damage.append(1)
    sums = await exchanged(2, *members)

    assert site.shard().machine.totals.bad_checksums == 1
    assert alike(sums[0], expected("topk", 2, 1)[1])


async def test_a_rank_with_other_settings_is_told_all_that_differs(site: Site, join: Join) -> None:
    await join(0, codec="topk", ratio=100.0)
    with pytest.raises(ExchangeFailed) as caught:
        await join(1, codec="topk", ratio=50.0, exact=True, link={"quorum": 0.75})
    assert "codec_settings.ratio: the run has 100.0, this rank 50.0" in str(caught.value)
    assert "codec_settings.exact: the run has False, this rank True" in str(caught.value)
    assert "quorum: the run has 1.0, this rank 0.75" in str(caught.value)

    with pytest.raises(ExchangeFailed, match="codec: the run has topk, this rank qsgd"):
        await join(1, codec="qsgd")


async def test_a_payload_that_is_none_is_refused_and_the_others_go_on(site: Site, join: Join) -> None:
    good, bad = await join(0), await join(1)
    waiting = asyncio.create_task(asyncio.to_thread(good.exchange, 1))
    payload = Payload(codec="topk", version=bad.codec.version, size=5, parts=(torch.zeros(3),))
    bad.link.begin()
    round_ = Round(number=1, world_size=2, ratio=4.0, rank=1, seed=7)
    with pytest.raises(ExchangeFailed, match=r"the segment has .* elements, the payload 5"):
        await asyncio.to_thread(bad.link.exchange, {0: [payload]}, round_)

    await waiting
    assert good.accepted == [[True]]
    assert good.link.size == 1


async def test_a_sum_that_cannot_be_made_ends_the_ranks_and_those_started_again_go_on(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> bytes:
        raise OSError(f"no space left in {tmp_path}")

    async with running(Site(folder=tmp_path)) as site:
        members = [await join(rank, targets=[site.target], link=HASTY) for rank in range(2)]
        await exchanged(1, *members)
        monkeypatch.setattr(site.shard()._sums, "reduce", full)
        for failed in await asyncio.gather(*(_failing(member, 2) for member in members)):
            assert "A sum failed" in failed
            assert str(tmp_path) not in failed

        again = [await join(rank, targets=[site.target], link=HASTY) for rank in range(2)]
        sums = await exchanged(again[0].link.next_round, *again)
        assert alike(*sums)
        for member in (*members, *again):
            await asyncio.to_thread(member.link.kill)


async def _failing(member: Member, number: int) -> str:
    with pytest.raises(ExchangeFailed) as caught:
        await asyncio.to_thread(member.exchange, number)
    return str(caught.value)


async def test_a_restarted_server_goes_on_with_what_it_had_kept_back(join: Join, tmp_path: Path) -> None:
    async with running(Site(folder=tmp_path)) as site:
        members = [await join(rank, targets=[site.target]) for rank in range(2)]
        await exchanged(1, *members)
        waiting = asyncio.create_task(asyncio.to_thread(members[0].exchange, 2))
        await site.until(lambda: site.has_sent(0, 2))
        epoch = site.shard().machine.members.epoch
        await site.stop()
        await site.start()
        await exchanged(2, members[1])
        await waiting
        await exchanged(3, *members)

        assert site.shard().machine.members.epoch > epoch
        assert site.shard().lost_residuals == 0
        for member in members:
            assert all(alike(got, sum_) for got, sum_ in zip(member.got, expected("topk", 2, 1), strict=True))
            await asyncio.to_thread(member.link.kill)


async def test_a_rank_that_has_sent_nothing_to_the_server_before_joins_the_restarted_one(
    site: Site, join: Join
) -> None:
    members = [await join(rank, link=HASTY) for rank in range(2)]
    await site.stop()
    await site.start()
    waiting = asyncio.create_task(asyncio.to_thread(members[0].exchange, 1))
    await site.until(lambda: bool(site.servicer.held()) and site.has_sent(0, 1))
    # It believes that it is a member, in an epoch that has the number of this server's.
    sums = [await asyncio.to_thread(members[1].exchange, 1), await waiting]

    assert alike(*sums)
    assert members[0].link.size == 2


async def test_a_restarted_server_still_has_the_newest_sum_for_one_who_lacks_it(join: Join, tmp_path: Path) -> None:
    async with running(Site(folder=tmp_path)) as site:
        fast, slow = [await join(rank, targets=[site.target], link=QUORUM) for rank in range(2)]
        await exchanged(1, fast, slow)
        waiting = asyncio.create_task(asyncio.to_thread(fast.exchange, 2))
        await site.until(lambda: site.has_sent(0, 2))
        await site.tick(30.0)
        await waiting
        await site.stop()
        await site.start()
        await exchanged(2, slow)

        assert slow.accepted == [[True], [False]]
        assert alike(fast.got[1], slow.got[1])
        await exchanged(3, fast, slow)
        assert alike(fast.got[2], slow.got[2])


async def test_without_a_folder_what_a_restarted_server_had_kept_back_is_counted_as_lost(join: Join) -> None:
    async with running(Site()) as site:
        members = [await join(rank, targets=[site.target]) for rank in range(2)]
        await exchanged(1, *members)
        await site.stop()
        await site.start()
        sums = await exchanged(2, *members)

        assert site.shard().lost_residuals == 1
        assert alike(sums[0], sums[1])
        assert not alike(sums[0], expected("topk", 2, 1)[1])
