"""A site, and ranks that join it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import pytest
import torch

from fulmen.rpc.channel import FulmenChannel
from fulmen_exchange.codecs.codec import SegmentCodec
from fulmen_exchange.links.grpc_link import GrpcLink, GrpcParticipant
from fulmen_exchange.links.grpc_server import dial
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.registry import make_codec
from tests.support.exchange.world import LEASE_S, ROWS, RUN, Member, Site, layout_of, running, settings_named


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running(Site()) as started:
        yield started


@pytest.fixture
async def join(site: Site) -> AsyncIterator[Callable[..., Awaitable[Member]]]:
    """Yields what makes a rank join at the site; all links are ended afterwards."""
    members: list[Member] = []

    async def join_as(
        rank: int,
        *,
        of: int = 2,
        run: str = RUN,
        rows: int = ROWS + 3,
        codec: str = "topk",
        targets: Sequence[str] = (),
        connect: Callable[[str], FulmenChannel] = dial,
        link: dict[str, float] | None = None,
        **more: object,
    ) -> Member:
        targets = tuple(targets) or (site.target,)
        settings = settings_named(codec, **more)
        layout = layout_of(settings, len(targets), rows=rows)
        made = make_codec(settings)
        who = GrpcParticipant(
            training_run=run, rank=rank, world_size=of, layout=layout, codec=made, codec_settings=settings
        )
        given = GrpcLinkSettings.model_validate({"targets": targets, "lease_s": LEASE_S, **(link or {})})
        opened = await asyncio.to_thread(partial(GrpcLink.open, who, given, connect=connect))
        state = made.new_state(torch.zeros(layout.size_of(0))) if isinstance(made, SegmentCodec) else {}
        members.append(Member(opened, made, layout, state))
        return members[-1]

    yield join_as
    for member in members:
        await asyncio.to_thread(member.link.kill)
