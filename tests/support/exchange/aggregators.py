"""An aggregator with the terms of a small run, and the chunks that it is sent."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fulmen_exchange.aggregator.effects import (
    Chunk,
    CompletedSum,
    Effect,
    Reply,
)
from fulmen_exchange.aggregator.membership import Key
from fulmen_exchange.aggregator.rounds import RoundMachine
from fulmen_exchange.aggregator.terms import (
    SUM,
    CallTerms,
    StragglerPolicy,
    Terms,
)

SIZE = 5000
TERMS = Terms(
    world_size=2, shard=0, shard_count=1, layout_digest="layout", codec="topk", codec_version=1,
    settings_json='{"codec": "topk", "ratio_down": 100}', segment_sizes=(SIZE,),
    patience=StragglerPolicy(quorum=0.75, min_wait_s=0.5, max_wait_s=8.0, straggler_timeout_s=60.0, lease_s=10.0),
)  # fmt: skip
PLAIN = CallTerms(bucket=0, codec=SUM, codec_version=1, number=0, ratio=1.0, seed=0, flush=False, total_bytes=4)
CODED = CallTerms(bucket=0, codec="topk", codec_version=1, number=1, ratio=4.0, seed=0, flush=False)


def chunk(key: Key, *, epoch: int, terms: CallTerms = CODED, data: bytes = b"abcd") -> Chunk:
    """Returns a whole payload."""
    return Chunk(epoch=epoch, key=key, terms=terms, offset=0, total_bytes=len(data), data=data, crc32=zlib.crc32(data))


SUMMED = Reply(size=3, messages=(b"sum",))


def started(*ranks: int) -> RoundMachine:
    """Returns rounds with these members."""
    machine = RoundMachine(replace(TERMS, world_size=len(ranks)))
    for rank in ranks:
        machine.join(rank, str(rank), 0.0)
    return machine


def contributors(
    machine: RoundMachine, rank: int, key: Key, now_s: float = 0.0, terms: CallTerms = CODED
) -> list[Effect]:
    return machine.take(rank, str(rank), chunk(key, epoch=machine.members.epoch, terms=terms), now_s)


def kept(rank: int, key: Key) -> Mapping[Key, tuple[CallTerms, CompletedSum]]:
    """Returns a sum as it is read from its file."""
    return {key: (CODED, CompletedSum(contributors={rank: str(rank)}, member_count=1, reply=SUMMED))}


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
