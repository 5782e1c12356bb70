"""Sums over sockets are those of a process group, bit for bit."""

from __future__ import annotations

import asyncio

import pytest
import torch

from fulmen_algorithm.exchange import wire
from fulmen_algorithm.exchange.aggregator.terms import MAX_RANKS
from fulmen_algorithm.exchange.codec import Round, SegmentCodec
from fulmen_algorithm.exchange.registry import load_codecs, make_codec
from fulmen_algorithm.exchange.shard import Shard
from tests.integration.exchange.world import Join, Site, gradient_of, layout_of, settings_named

SEGMENT_CODECS = sorted(
    name for name, entry in load_codecs().items() if isinstance(make_codec(entry.settings()), SegmentCodec)
)
ROUNDS = 3


def expected(codec: str, ranks: int, shards: int) -> list[torch.Tensor]:
    """Computes what every rank gets from the shards alone, as `TorchLink` calls them."""
    settings = settings_named(codec)
    layout = layout_of(settings, shards)
    made = make_codec(settings)
    assert isinstance(made, SegmentCodec)
    cuts = layout.cuts_of(0)
    states = [made.new_state(torch.zeros(layout.size_of(0))) for _ in range(ranks)]
    held = [Shard(made) for _ in range(shards)]
    sums = []
    for number in range(1, ROUNDS + 1):
        sent = [
            made.encode(
                gradient_of(rank, number, layout.size_of(0)), states[rank], cuts,
                Round(number=number, world_size=ranks, ratio=4.0, rank=rank, seed=7),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        out = torch.zeros(layout.size_of(0))
        for shard in range(shards):
            as_shard = Round(number=number, world_size=ranks, ratio=4.0, rank=MAX_RANKS + shard, seed=7)
            payloads = [wire.decode(wire.encode(each[shard])) for each in sent]
            made.reply().add(held[shard].reduce(0, payloads, as_shard), out[cuts[shard] : cuts[shard + 1]])
        sums.append(out)
    return sums


@pytest.mark.parametrize("codec", SEGMENT_CODECS)
async def test_two_ranks_and_two_shards_get_the_sums_of_a_process_group(codec: str, site: Site, join: Join) -> None:
    members = [await join(rank, of=2, codec=codec, targets=[site.target] * 2) for rank in range(2)]
    for number in range(1, ROUNDS + 1):
        await asyncio.gather(*(asyncio.to_thread(member.exchange, number) for member in members))
    for member in members:
        assert all(all(each) for each in member.accepted)
        for got, sum_ in zip(member.got, expected(codec, 2, 2), strict=True):
            assert torch.equal(got.view(torch.int32), sum_.view(torch.int32))


async def test_four_ranks_and_four_shards_get_the_sums_of_a_process_group(site: Site, join: Join) -> None:
    members = [await join(rank, of=4, targets=[site.target] * 4) for rank in range(4)]
    for number in range(1, ROUNDS + 1):
        await asyncio.gather(*(asyncio.to_thread(member.exchange, number) for member in members))
    for member in members:
        for got, sum_ in zip(member.got, expected("topk", 4, 4), strict=True):
            assert torch.equal(got.view(torch.int32), sum_.view(torch.int32))


@pytest.mark.parametrize("size", [1, 65_536, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_a_tensor_is_summed_as_it_is(size: int, dtype: torch.dtype, site: Site, join: Join) -> None:
    members = [await join(rank, of=2, targets=[site.target] * 2) for rank in range(2)]
    tensors = [gradient_of(rank, 1, size).to(dtype) for rank in range(2)]
    wanted = (tensors[0].float() + tensors[1].float()).to(dtype)
    for member in members:
        member.link.begin()
    await asyncio.gather(
        *(asyncio.to_thread(member.link.all_reduce, tensor) for member, tensor in zip(members, tensors, strict=True))
    )
    assert torch.equal(tensors[0], wanted)
    assert torch.equal(tensors[1], wanted)
    assert members[0].link.sent_bytes >= size * (2 if dtype is torch.bfloat16 else 4)
