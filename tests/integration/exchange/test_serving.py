"""How a server of shards drains, what it holds at most, and what it answers those who look."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import GradientExchangeServiceStub
from fulmen.errors import ArgumentInvalid, Draining
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_exchange.aggregator.terms import CHUNK_BYTES
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.server import servicer as gradient_exchange
from fulmen_exchange.server.servicer import ExchangeLimits
from tests.support.exchange.channels import Tapped
from tests.support.exchange.sums import HASTY, alike, exchanged
from tests.support.exchange.world import LIMIT_S, OTHER_RUN, RUN, Join, Site, running

DAY_S = 86_400.0


async def test_a_server_that_drains_ends_at_once_and_ranks_go_on_with_the_next(join: Join, tmp_path: Path) -> None:
    async with running(Site(folder=tmp_path)) as site:
        members = [await join(rank, targets=[site.target]) for rank in range(2)]
        await exchanged(1, *members)
        waiting = asyncio.create_task(asyncio.to_thread(members[0].exchange, 2))
        await site.until(lambda: site.has_sent(0, 2))

        site.servicer.drain()
        async with open_channel(site.target) as channel:
            stub = GradientExchangeServiceStub(channel)
            with pytest.raises(Draining):
                await stub.Join(pb.JoinRequest(training_run=RUN), timeout=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            await site.server.server.stop(DAY_S)  # no call is left that would be waited for
        await site.servicer.end()
        assert not waiting.done()

        await site.start()
        sums = [await asyncio.to_thread(members[1].exchange, 2), await waiting]
        assert alike(*sums)
        for member in members:
            await asyncio.to_thread(member.link.kill)


async def test_a_server_holds_no_more_shards_than_it_may(join: Join) -> None:
    async with running(Site(limits=ExchangeLimits(max_shards=2, max_elements=200_000))) as site:
        await join(0, of=1, targets=[site.target])
        with pytest.raises(ExchangeFailed, match=r"QUOTA_EXCEEDED.*2 shards"):
            await join(0, of=1, run="projects/default/trainingRuns/2", targets=[site.target] * 2)
        with pytest.raises(ExchangeFailed, match="must be between 0 and 200000"):
            await join(0, of=1, run="projects/default/trainingRuns/2", targets=[site.target], rows=200_001 // 16 + 1)


async def test_a_server_holds_no_more_bytes_than_it_may(join: Join) -> None:
    rows = CHUNK_BYTES // 16  # at a ratio of 4 a byte for each element; its sum and residual take eight
    async with running(Site(limits=ExchangeLimits(max_held_bytes=26 * CHUNK_BYTES))) as site:
        members = [
            await join(rank, targets=[site.target], rows=rows, link=HASTY, ratio_down=100.0) for rank in range(2)
        ]
        for number in range(1, 4):
            assert alike(*await exchanged(number, *members))
        # Buffers that are kept for the next round give way to those of another size.
        for member in members:
            member.link.begin()
        larger = [torch.ones(5 * CHUNK_BYTES // 4) for _ in members]
        await asyncio.gather(
            *(asyncio.to_thread(each.link.all_reduce, one) for each, one in zip(members, larger, strict=True))
        )
        assert site.shard().held_bytes <= 26 * CHUNK_BYTES

        with pytest.raises(ExchangeFailed, match=r"no memory for a shard of \d+ bytes.*EXCHANGE_MAX_HELD_BYTES"):
            await join(0, of=2, run=OTHER_RUN, targets=[site.target], rows=3 * rows, link=HASTY, ratio_down=100.0)
        assert alike(*await exchanged(5, *members))
        for member in members:
            await asyncio.to_thread(member.link.kill)


async def test_the_sums_that_a_member_may_ask_for_again_are_counted(join: Join) -> None:
    async with running(Site(limits=ExchangeLimits(max_held_bytes=20 * CHUNK_BYTES))) as site:
        member = await join(0, of=1, targets=[site.target], link=HASTY)
        member.link.begin()
        refusal = r"QUOTA_EXCEEDED.*no memory for a payload.*EXCHANGE_MAX_HELD_BYTES"

        def sum_many() -> None:
            # All in one round, whose sums are kept until the next but one.
            for _ in range(40):
                member.link.all_reduce(torch.ones(CHUNK_BYTES // 4))

        with capture_logs() as logs, pytest.raises(ExchangeFailed, match=refusal):
            await asyncio.to_thread(sum_many)
        assert [entry["reason"] for entry in logs if entry.get("reason")] == ["QUOTA_EXCEEDED"], "it had to try again"
        assert site.shard().held_bytes <= 20 * CHUNK_BYTES
        await asyncio.to_thread(member.link.kill)


async def test_a_shard_whose_sums_and_residuals_would_not_fit_is_refused_when_a_rank_joins(join: Join) -> None:
    async with running(Site(limits=ExchangeLimits(max_held_bytes=2**20))) as site:
        with pytest.raises(ExchangeFailed, match=r"no memory for a shard of \d+ bytes.*MAX_HELD_BYTES"):
            await join(0, of=1, targets=[site.target], rows=2**17 // 16 + 1, ratio_down=100.0)
        assert not site.servicer.held()


async def test_what_was_kept_of_a_run_that_is_over_goes_when_its_ranks_have_left(join: Join, tmp_path: Path) -> None:
    over: set[str] = set()
    async with running(Site(folder=tmp_path, over=over)) as site:
        member = await join(0, of=1, targets=[site.target])
        await exchanged(1, member)
        await site.tick(DAY_S)
        assert list(tmp_path.rglob("*.safetensors"))

        over.add(RUN)
        await asyncio.to_thread(member.link.close)
        await site.tick(1.0)  # the shard is there as long as ranks may come back
        assert list(tmp_path.rglob("*.safetensors"))
        await site.tick(DAY_S)
        assert not list(tmp_path.iterdir())


async def test_the_shards_of_a_run_come_in_pages(site: Site, join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    await join(0, of=1, targets=[site.target] * 5)
    async with open_channel(site.target) as channel:
        stub = GradientExchangeServiceStub(channel)
        [whole, *_] = [await stub.GetExchange(pb.GetExchangeRequest(training_run=RUN))]
        assert len(whole.shards) == 5
        assert whole.next_page_token == ""
        assert not any(shard.terms.segment_sizes for shard in whole.shards)

        monkeypatch.setattr(gradient_exchange, "PAGE_BYTES", 2 * whole.shards[0].ByteSize() + 20)
        pages, token = [], ""
        while True:
            page = await stub.GetExchange(pb.GetExchangeRequest(training_run=RUN, page_token=token))
            pages.append([shard.terms.shard for shard in page.shards])
            if not (token := page.next_page_token):
                break
        assert pages == [[0, 1], [2, 3], [4]]
        with pytest.raises(ArgumentInvalid, match="page_token"):
            await stub.GetExchange(pb.GetExchangeRequest(training_run=RUN, page_token="next"))


async def test_terms_that_differ_in_everything_are_told_in_an_answer_of_bounded_size(site: Site, join: Join) -> None:
    await join(0, rows=4096)
    async with open_channel(site.target) as channel:
        terms = pb.ExchangeTerms(
            world_size=2, shard_count=1, layout_digest="x" * 128, codec="topk", codec_version=1,
            codec_settings_json='{"codec": "%s"}' % ("y" * 10_000), segment_sizes=[1] * 60_000, quorum=1.0,
            min_wait_s=0.2, max_wait_s=30.0, straggler_timeout_s=300.0, lease_s=15.0,
        )  # fmt: skip
        request = pb.JoinRequest(training_run=RUN, rank=1, incarnation="i", terms=terms)
        with pytest.raises(ArgumentInvalid, match="differ") as caught:
            await GradientExchangeServiceStub(channel).Join(request, timeout=LIMIT_S)
    assert 0 < len(caught.value.violations) <= gradient_exchange.MAX_VIOLATIONS


async def test_a_link_that_cannot_be_opened_leaves_no_channel_open(site: Site, join: Join) -> None:
    channels: list[Tapped] = []

    def connect(target: str) -> FulmenChannel:
        if channels:
            raise OSError("no such certificate")
        channels.append(Tapped(open_channel(target)))
        return channels[0]

    with pytest.raises(OSError, match="no such certificate"):
        await join(0, targets=[site.target, "127.0.0.1:1"], connect=connect)
    assert [channel.is_closed for channel in channels] == [True]


async def test_a_sum_that_was_made_without_a_rank_that_was_given_up_is_counted(site: Site, join: Join) -> None:
    members = [await join(rank, link={**HASTY, "lease_s": 3600.0}) for rank in range(2)]
    tensors = [torch.ones(10), torch.full((10,), 2.0)]
    members[0].link.begin()
    waiting = asyncio.create_task(asyncio.to_thread(members[0].link.all_reduce, tensors[0]))
    await site.until(lambda: site.has_sent(0, 1))
    await site.tick(HASTY["straggler_timeout_s"])
    await waiting
    members[1].link.begin()
    await asyncio.to_thread(members[1].link.all_reduce, tensors[1])

    assert [member.link.missed_sums for member in members] == [0, 1]
    assert torch.equal(tensors[0], torch.ones(10))
    assert torch.equal(tensors[1], tensors[0])  # what it had put in is lost, to both alike


async def test_ranks_that_open_their_links_at_once_share_one_loop(site: Site, join: Join) -> None:
    members = await asyncio.gather(*(join(rank, of=3) for rank in range(3)))
    for number in (1, 2):
        sums = await exchanged(number, *members)
        assert all(alike(sums[0], other) for other in sums)
    await asyncio.gather(*(asyncio.to_thread(partial(member.link.close)) for member in members))
    assert site.shard().machine.members.ranks == []
