"""The sums that an exchange is expected to make, and exchanges on ranks of one process."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from fulmen_exchange import wire
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.aggregator.terms import MAX_RANKS
from fulmen_exchange.codecs.codec import Round, SegmentCodec
from fulmen_exchange.registry import make_codec
from tests.support.exchange.world import Member, gradient_of, layout_of, settings_named

ROUNDS = 3


def expected(codec: str, ranks: int, shards: int) -> list[torch.Tensor]:
    """Computes what every rank gets from the shards alone, as `TorchLink` calls them."""
    settings = settings_named(codec)
    layout = layout_of(settings, shards)
    made = make_codec(settings)
    assert isinstance(made, SegmentCodec)
    offsets = layout.offsets_of(0)
    states = [made.new_state(torch.zeros(layout.size_of(0))) for _ in range(ranks)]
    held = [Shard(made) for _ in range(shards)]
    sums = []
    for number in range(1, ROUNDS + 1):
        sent = [
            made.encode(
                gradient_of(rank, number, layout.size_of(0)), states[rank], offsets,
                Round(number=number, world_size=ranks, ratio=4.0, rank=rank, seed=7),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        out = torch.zeros(layout.size_of(0))
        for shard in range(shards):
            as_shard = Round(number=number, world_size=ranks, ratio=4.0, rank=MAX_RANKS + shard, seed=7)
            payloads = [wire.decode(wire.encode(each[shard])) for each in sent]
            made.reply().add(held[shard].reduce(0, payloads, as_shard), out[offsets[shard] : offsets[shard + 1]])
        sums.append(out)
    return sums


SHORT_LEASE_S = 0.3
HASTY = {"max_wait_s": 5.0, "straggler_timeout_s": 10.0, "deadline_s": 20.0}


async def exchanged(number: int, *members: Member) -> list[Tensor]:
    """Has members take a round together."""
    return list(await asyncio.gather(*(asyncio.to_thread(member.exchange, number) for member in members)))


def alike(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.int32), second.view(torch.int32))
