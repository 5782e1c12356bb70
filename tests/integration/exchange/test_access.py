"""Who may take part in an exchange, and what anybody sees of it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from functools import partial

import grpc.aio
import pytest

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.algorithm.v1.gradient_exchange_service_pb2_grpc import GradientExchangeServiceStub
from fulmen.errors import ArgumentInvalid, TrainingRunNotFound, Unavailable
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.links.grpc_chunks import head_checksum
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.exchange.world import RUN, Join, Site, running

KEY = "k" * 32


def with_token(role: Role, project: str = "projects/default") -> Callable[[str], FulmenChannel]:
    token = TokenSigner(KEY).issue(role, subject="test", ttl_s=600, project=project)
    return partial(open_channel, token=token)


async def test_only_a_service_token_of_the_runs_project_takes_part(join: Join) -> None:
    async with running(Site(options={"signing_key": KEY})) as site:
        targets = [site.target]
        with pytest.raises(ExchangeFailed, match="TOKEN_INVALID"):
            await join(0, targets=targets)
        with pytest.raises(ExchangeFailed, match="PERMISSION_DENIED"):
            await join(0, targets=targets, connect=with_token(Role.READER))
        with pytest.raises(ExchangeFailed, match="TRAINING_RUN_NOT_FOUND"):
            await join(0, targets=targets, connect=with_token(Role.SERVICE, "projects/other"))

        member = await join(0, of=1, targets=targets, connect=with_token(Role.SERVICE))
        await asyncio.to_thread(member.exchange, 1)
        async with with_token(Role.READER, "projects/other")(site.target) as channel:
            with pytest.raises(TrainingRunNotFound):
                await GradientExchangeServiceStub(channel).GetExchange(pb.GetExchangeRequest(training_run=RUN))
        await asyncio.to_thread(member.link.kill)


async def test_a_status_tells_who_takes_part_and_what_was_moved(site: Site, join: Join) -> None:
    members = [await join(rank) for rank in range(2)]
    await asyncio.gather(*(asyncio.to_thread(member.exchange, 1) for member in members))
    before = members[0].link.sent_bytes
    await asyncio.gather(*(asyncio.to_thread(member.exchange, 2) for member in members))

    async with open_channel(site.target) as channel:
        stub = GradientExchangeServiceStub(channel)
        [status] = (await stub.GetExchange(pb.GetExchangeRequest(training_run=RUN))).shards
        went = await stub.GetRound(pb.GetRoundRequest(training_run=RUN, round=2))
        with pytest.raises(ArgumentInvalid, match="Round not found"):
            await stub.GetRound(pb.GetRoundRequest(training_run=RUN, round=9))

    assert (status.round, [member.rank for member in status.members]) == (2, [0, 1])
    assert status.sum_count == 2
    assert 0 < status.received_bytes <= sum(member.link.sent_bytes for member in members)
    assert status.sent_bytes == sum(member.link.received_bytes for member in members)
    moved = status.received_bytes + status.sent_bytes
    assert status.ratio == pytest.approx(2 * 2 * 2 * members[0].layout.size_of(0) * 4 / moved)
    assert (list(went.ranks), list(went.late_ranks)) == ([0, 1], [])
    assert went.raw_bytes == members[0].layout.size_of(0) * 4
    assert went.sent_bytes == pytest.approx(members[0].link.sent_bytes - before, rel=0.01)  # they differ a little


async def test_a_stream_that_opens_nothing_or_is_not_joined_is_refused(site: Site) -> None:
    async with open_channel(site.target) as channel:
        stream = GradientExchangeServiceStub(channel).Exchange()
        await stream.write(pb.ExchangeRequest(chunk=pb.GradientChunk(round=1)))
        with pytest.raises(ArgumentInvalid, match="open"):
            await stream.read()
        stream = GradientExchangeServiceStub(channel).Exchange()
        await stream.write(pb.ExchangeRequest(open=pb.OpenExchange(training_run=RUN)))
        with pytest.raises(Unavailable, match="join it first"):
            await stream.read()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"total_bytes": 10**12}, "must not exceed"),
        ({"total_bytes": 4, "data": b"12345"}, "chunks must have"),
        ({"total_bytes": 8, "offset_bytes": 5, "data": b"123"}, "multiples"),
        ({"total_bytes": 4, "data": b"1234", "bucket": 7}, "1 buckets"),
        ({"total_bytes": 4, "data": b"1234", "codec": "dgc"}, "the run's codec is topk"),
    ],
)
async def test_a_chunk_of_no_payload_is_refused_before_anything_is_allocated(
    more: dict[str, object], text: str, site: Site, join: Join
) -> None:
    member = await join(0, of=1)
    incarnation = site.shard().machine.members.all()[0].incarnation
    chunk = pb.GradientChunk(
        membership_epoch=1, round=1, codec="topk", codec_version=member.codec.version,
        settings=pb.CallSettings(ratio=1.0), crc32=zlib.crc32(bytes(more.get("data", b""))),  # type: ignore[call-overload]
    )  # fmt: skip
    chunk.MergeFrom(pb.GradientChunk(**more))
    chunk.head_crc32 = head_checksum(chunk)
    async with open_channel(site.target) as channel:
        stream = GradientExchangeServiceStub(channel).Exchange()
        opened = pb.OpenExchange(training_run=RUN, rank=0, incarnation=incarnation)
        await stream.write(pb.ExchangeRequest(open=opened))
        await stream.write(pb.ExchangeRequest(chunk=chunk))
        answer = await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF

    assert answer.status.status == pb.SegmentStatus.STATUS_INVALID
    assert text in answer.status.text
