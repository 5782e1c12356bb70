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
from structlog.testing import capture_logs

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.rpc.channel import FulmenChannel
from fulmen_exchange.aggregator.terms import CHUNK_BYTES
from fulmen_exchange.codecs.codec import Payload, Round
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.links.grpc_chunks import ReadChunk
from fulmen_exchange.links.grpc_link import MAX_IN_FLIGHT, link_loop
from fulmen_exchange.links.grpc_server import dial
from fulmen_exchange.links.pieces import FRONT_BYTES, SMALL
from tests.support.exchange.channels import Read, Tapped, Write
from tests.support.exchange.line import Line
from tests.support.exchange.sums import HASTY, alike, exchanged
from tests.support.exchange.world import Join, Member, Site, running

QUORUM = {"quorum": 0.5, "max_wait_s": 30.0}


async def test_a_call_that_nobody_else_makes_ends_with_its_deadline(join: Join, site: Site) -> None:
    alone = await join(0, link={"max_wait_s": 0.2, "straggler_timeout_s": 0.3, "deadline_s": 2.5})
    with pytest.raises(ExchangeFailed, match=r"within 2\.5 s in round 1, call 0"):
        await exchanged(1, alone)


def altered(target: str, alter: Callable[[pb.GradientChunk], Awaitable[None]]) -> FulmenChannel:
    """Opens a channel whose chunks go through a function first."""

    def altering(write: Write) -> Write:
        async def altered_write(message: bytes | pb.ExchangeRequest) -> None:
            if isinstance(message, bytes):
                message = pb.ExchangeRequest.FromString(message)
                await alter(message.chunk)
            await write(message)

        return altered_write

    return Tapped(dial(target), write=altering)


async def test_a_slow_upload_is_cut_off_when_the_sum_is_made_without_it(site: Site, join: Join) -> None:
    goes_on = threading.Event()

    async def hold(chunk: pb.GradientChunk) -> None:
        if chunk.offset_bytes:
            await asyncio.to_thread(goes_on.wait, 20.0)

    rows = 3 * CHUNK_BYTES // 16  # at a ratio of 4 a byte for each element: three chunks
    fast = await join(0, rows=rows, link=QUORUM)
    slow = await join(1, rows=rows, link=QUORUM, connect=lambda target: altered(target, hold))
    both = asyncio.gather(*(asyncio.to_thread(member.exchange, 1) for member in (fast, slow)))
    await site.until(lambda: site.has_sent(1, 1) and bool(site.shard().machine.arrivals._offsets_s))
    await site.tick(30.0)
    await site.until(lambda: not any(each.is_wanted for each in slow.link._shards[0]._awaited.values()))  # it knows
    goes_on.set()
    sums = await both

    assert alike(*sums)
    assert (fast.accepted, slow.accepted) == ([[True]], [[False]])
    assert slow.link.sent_bytes <= 2 * CHUNK_BYTES


@pytest.mark.parametrize("name", ["round", "call", "offset_bytes", "total_bytes", "bucket", "membership_epoch"])
async def test_a_chunk_whose_head_was_damaged_changes_nothing_and_is_sent_again(
    name: str, site: Site, join: Join
) -> None:
    damaged: list[int] = []

    async def damage(chunk: pb.GradientChunk) -> None:
        if not damaged:
            damaged.append(getattr(chunk, name))
            setattr(chunk, name, damaged[0] ^ 1 << 30)

    one = await join(0, connect=lambda target: altered(target, damage))
    other = await join(1)
    async with running(Site()) as calm:
        members = [await join(rank, targets=[calm.target]) for rank in range(2)]
        wanted = await exchanged(1, *members)
        for member in members:
            await asyncio.to_thread(member.link.kill)
    for sum_ in await exchanged(1, one, other):
        assert alike(sum_, wanted[0])
    assert damaged
    assert site.shard().machine.round == 1


def unruly(target: str, chance: random.Random) -> FulmenChannel:
    """Opens a channel that delays messages, repeats some, and shuffles the chunks of a payload."""

    def shuffling(write: Write) -> Write:
        held: list[bytes] = []

        async def shuffled(message: bytes | pb.ExchangeRequest) -> None:
            await asyncio.sleep(chance.uniform(0.0, 0.002))
            if not isinstance(message, bytes):
                await write(message)
                return
            chunk = pb.ExchangeRequest.FromString(message).chunk
            held.append(message)
            is_last = chunk.offset_bytes + len(chunk.data) == chunk.total_bytes
            if is_last or chance.random() < 0.4:
                chance.shuffle(held)
                for each in [*held, *chance.choices(held, k=chance.randrange(2))]:
                    await write(each)
                held.clear()

        return shuffled

    def delaying(read: Read) -> Read:
        async def late() -> Any:
            await asyncio.sleep(chance.uniform(0.0, 0.002))
            return await read()

        return late

    return Tapped(dial(target), write=shuffling, read=delaying)


@pytest.mark.parametrize("seed", range(3))
async def test_messages_that_are_late_repeated_and_in_another_order_change_nothing(
    seed: int, site: Site, join: Join
) -> None:
    rows = 3 * CHUNK_BYTES // 16 + 5  # at a ratio of 4 three chunks, and a rest
    chance = random.Random(seed)
    members = [await join(rank, rows=rows, connect=lambda at: unruly(at, chance)) for rank in range(2)]
    async with running(Site()) as other:
        calm = [await join(rank, rows=rows, targets=[other.target]) for rank in range(2)]
        for number in (1, 2, 3):
            sums = await exchanged(number, *members)
            wanted = await exchanged(number, *calm)
            assert all(alike(sum_, wanted[0]) for sum_ in sums)
        for member in calm:
            await asyncio.to_thread(member.link.kill)
    assert all(member.accepted == [[True]] * 3 for member in members)


@pytest.mark.parametrize("seed", range(2))
async def test_lines_that_lose_a_hundredth_and_shuffle_the_rest_change_nothing(
    seed: int, site: Site, join: Join
) -> None:
    rows, chance = 3 * CHUNK_BYTES // 16 + 5, random.Random(seed)
    lines = [Line(int(site.target.rpartition(":")[2]), seed=seed + rank) for rank in range(2)]
    try:
        members = [
            await join(rank, rows=rows, targets=[line.address], connect=lambda at: unruly(at, chance))
            for rank, line in enumerate(lines)
        ]
        async with running(Site()) as other:
            calm = [await join(rank, rows=rows, targets=[other.target]) for rank in range(2)]
            for line in lines:
                line.loses = 0.01
            number = 0
            while number < 3 or not all(line.lost for line in lines):
                number += 1
                sums = await exchanged(number, *members)
                wanted = await exchanged(number, *calm)
                assert all(alike(sum_, wanted[0]) for sum_ in sums)
            for line in lines:
                line.loses = 0.0
            for member in (*calm, *members):
                await asyncio.to_thread(member.link.kill)
        assert all(member.accepted == [[True]] * number for member in members)
    finally:
        for line in lines:
            line.close()


async def test_a_payload_that_a_joining_rank_interrupts_is_sent_again_before_later_ones(site: Site, join: Join) -> None:
    # Otherwise the sums of later calls would be made first, and the interrupted one never.
    begun, goes_on, main = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    sent_again: list[int] = []

    async def hold(chunk: pb.GradientChunk) -> None:
        if chunk.membership_epoch == 2:
            sent_again.append(chunk.call)
        elif chunk.offset_bytes:
            main.call_soon_threadsafe(begun.set)
            await asyncio.to_thread(goes_on.wait, 20.0)

    # Of a tensor of this size all pieces are of the short length: a quarter.
    link = {"piece_bytes": 12 * CHUNK_BYTES, "max_wait_s": 5.0, "straggler_timeout_s": 10.0, "deadline_s": 20.0}
    member = await join(0, of=1, link=link, connect=lambda target: altered(target, hold))
    tensor = torch.ones(3 * (3 * CHUNK_BYTES - FRONT_BYTES) // 4)
    member.link.begin()
    waiting = asyncio.create_task(asyncio.to_thread(member.link.all_reduce, tensor))
    await begun.wait()
    await join(1, of=1, link=link)
    [shard] = member.link._shards
    await site.until(lambda: shard._request.membership_epoch == site.shard().machine.members.epoch)
    goes_on.set()
    await waiting

    assert sent_again == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert torch.equal(tensor, torch.ones_like(tensor))


async def test_a_rank_reports_its_newest_sum_even_if_an_earlier_one_was_lost(site: Site, join: Join) -> None:
    # A server that has lost its sums must not make one again that this rank has: the others would get other bits.
    def losing(read: Read) -> Read:
        async def without_first() -> Any:
            while True:
                message = await read()
                of = message.head if isinstance(message, ReadChunk) else message.status
                if of.call:
                    return message

        return without_first

    member = await join(
        0, of=1, link={"piece_bytes": 2**16, **HASTY}, connect=lambda target: Tapped(dial(target), read=losing)
    )
    [shard] = member.link._shards
    member.link.begin()
    waiting = asyncio.create_task(asyncio.to_thread(member.link.all_reduce, torch.ones(SMALL + 1)))
    await site.until(lambda: shard._received == (1, MAX_IN_FLIGHT))
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(shard.join(), link_loop()))
    assert (shard._request.round, shard._request.call) == (1, MAX_IN_FLIGHT)

    link_loop().call_soon_threadsafe(shard._fail, ExchangeFailed("the test is over"))
    with pytest.raises(ExchangeFailed, match="is over"):
        await waiting


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


async def test_a_server_that_dies_is_noticed_at_once_and_so_is_its_return(site: Site, join: Join) -> None:
    members = [await join(rank, link=HASTY) for rank in range(2)]
    await exchanged(1, *members)
    with capture_logs() as logs:
        await site.stop()
        await site.until(lambda: sum(line["event"] == "exchange_server_away" for line in logs) == 2)
        await site.start()
        await exchanged(2, *members)
    lines = [line for line in logs if line["event"].startswith("exchange_server")]
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("exchange_server_away", "warning"),
        ("exchange_server_away", "warning"),
        ("exchange_server_back", "warning"),
        ("exchange_server_back", "warning"),
    ]
    assert {line["shard"] for line in lines} == {members[0].link._shards[0].name}
