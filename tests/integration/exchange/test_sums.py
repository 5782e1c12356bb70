"""Sums over sockets are those of a process group, bit for bit."""

from __future__ import annotations

import asyncio

import pytest
import torch

from fulmen_exchange.aggregator.terms import CHUNK_BYTES
from fulmen_exchange.codecs.codec import Bucket, LinearCodec, Round, SegmentCodec
from fulmen_exchange.links.grpc_link import MAX_IN_FLIGHT
from fulmen_exchange.links.pieces import FRONT_BYTES, SMALL, waves
from fulmen_exchange.registry import load_codecs, make_codec
from tests.support.exchange.sums import ROUNDS, expected
from tests.support.exchange.world import Join, Member, Site, gradient_of

SEGMENT_CODECS = sorted(
    name for name, entry in load_codecs().items() if isinstance(make_codec(entry.settings()), SegmentCodec)
)


@pytest.mark.parametrize(("codec", "count"), [*((codec, 2) for codec in SEGMENT_CODECS), ("topk", 4)])
async def test_as_many_ranks_and_shards_get_the_sums_of_a_process_group(
    codec: str, count: int, site: Site, join: Join
) -> None:
    members = [await join(rank, of=count, codec=codec, targets=[site.target] * count) for rank in range(count)]
    for number in range(1, ROUNDS + 1):
        await asyncio.gather(*(asyncio.to_thread(member.exchange, number) for member in members))
    for member in members:
        assert all(all(each) for each in member.accepted)
        for got, sum_ in zip(member.got, expected(codec, count, count), strict=True):
            assert torch.equal(got.view(torch.int32), sum_.view(torch.int32))


async def reduced(members: list[Member], tensors: list[torch.Tensor]) -> None:
    """Has members sum their tensors, in a round of its own."""
    for member in members:
        member.link.begin()
    await asyncio.gather(
        *(asyncio.to_thread(member.link.all_reduce, tensor) for member, tensor in zip(members, tensors, strict=True))
    )


KEPT = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("size", [1, 65_536, 300_001])
@pytest.mark.parametrize("dtype", [*KEPT, torch.float64])
async def test_a_tensor_is_summed_as_it_is(size: int, dtype: torch.dtype, site: Site, join: Join) -> None:
    members = [await join(rank, of=2, targets=[site.target] * 2) for rank in range(2)]
    tensors = [(gradient_of(rank, 1, size) * 40).to(dtype) for rank in range(2)]
    exact = (tensors[0].double() + tensors[1].double()).float()
    # Whole numbers go around, as those of a process group do; all others are rounded once.
    wanted = exact.to(dtype) if dtype.is_floating_point else exact.int().to(dtype)
    await reduced(members, [torch.zeros(SMALL + 1) for _ in members])  # after which all know all members
    before = members[0].link.sent_bytes
    await reduced(members, tensors)
    for tensor in tensors:
        torch.testing.assert_close(tensor, wanted, rtol=1e-6 if dtype is torch.float64 else 0.0, atol=0.0)
    assert torch.equal(tensors[0], tensors[1])
    sent_each = dtype.itemsize if dtype in KEPT else 4
    assert 0 <= members[0].link.sent_bytes - before - size * sent_each <= 200


async def test_masked_gradients_are_summed_by_a_server_that_cannot_read_them(site: Site, join: Join) -> None:
    members = [await join(rank, of=2, targets=[site.target] * 2) for rank in range(2)]
    codec = make_codec(load_codecs()["masked"].settings())
    assert isinstance(codec, LinearCodec)
    gradients = [gradient_of(rank, 1, 300_001) for rank in range(2)]

    def reduce(member: Member) -> torch.Tensor:
        flat = gradients[member.link.rank].clone()
        bucket = Bucket(index=0, flat=flat, matrices=(), offsets=(0, flat.numel()))
        round_ = Round(number=1, world_size=2, rank=member.link.rank)
        member.link.begin()
        codec.reduce(bucket, codec.new_state(bucket), member.link.all_reduce, round_)
        return flat

    found = await asyncio.gather(*(asyncio.to_thread(reduce, member) for member in members))
    torch.testing.assert_close(found[0], gradients[0] + gradients[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(*found)


async def test_a_long_tensor_is_summed_in_pieces_of_which_several_are_under_way(site: Site, join: Join) -> None:
    members = [await join(rank, link={"piece_bytes": 2**16}) for rank in range(2)]
    size = 6 * 2**16 // 4 + 5
    tensors = [gradient_of(rank, 1, size).view(-1, 1) for rank in range(2)]
    wanted = tensors[0] + tensors[1]
    members[0].link.begin()
    first = asyncio.create_task(asyncio.to_thread(members[0].link.all_reduce, tensors[0]))
    machine = site.shard().machine
    await site.until(lambda: len(machine._open) == MAX_IN_FLIGHT)  # the other has not begun
    members[1].link.begin()
    await asyncio.to_thread(members[1].link.all_reduce, tensors[1])
    await first

    assert machine.totals.sums == 7
    assert all(torch.equal(tensor, wanted) for tensor in tensors)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("size", [1, SMALL, SMALL + 1, 10**6, 7 * 10**6])
def test_pieces_cover_a_tensor_and_fill_their_chunks(size: int, shards: int) -> None:
    # 4 MiB: the first and the last are shorter, since nothing comes down while the first goes up.
    flat = torch.arange(size)
    found = list(waves(flat, shards, 2**22))
    assert torch.equal(torch.cat([piece for wave in found for piece in wave]), flat)
    lengths = [sum(map(len, wave)) * flat.element_size() for wave in found]
    for length in lengths if size > SMALL else ():
        assert length <= shards * (4 * CHUNK_BYTES - FRONT_BYTES)
    if size == 7 * 10**6:
        quarter, half = shards * (CHUNK_BYTES - FRONT_BYTES), shards * (2 * CHUNK_BYTES - FRONT_BYTES)
        assert lengths[:2] == lengths[:-3:-1] == [quarter // 8 * 8, half // 8 * 8]


async def test_a_tensor_that_does_not_lie_in_a_row_is_summed(site: Site, join: Join) -> None:
    members = [await join(rank) for rank in range(2)]
    tensors = [gradient_of(rank, 1, 600).view(20, 30).t() for rank in range(2)]
    wanted = tensors[0] + tensors[1]
    await reduced(members, tensors)
    assert all(torch.equal(tensor, wanted) for tensor in tensors)
