"""Algorithm services that know a run, as they are built, and ranks of it that exchange over real links."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import SecretStr

from fulmen.rpc.channel import open_channel
from fulmen_algorithm.app import build
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import NO_POLICY, RunState, TrainingRun
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_exchange.codecs.codec import SegmentCodec
from fulmen_exchange.links.grpc_link import GrpcLink, GrpcParticipant
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.registry import make_codec
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.exchange.world import Member, layout_of, settings_named
from tests.support.service_kit.key_store import KeyService, serving_keys

KEY = "k" * 32
RUN = "projects/default/trainingRuns/small"
NOW = datetime(2026, 3, 14, 10, 15, tzinfo=UTC)
Tell = Callable[[RunRegistry], None]


def token(role: Role, project: str = "projects/default") -> str:
    return TokenSigner(KEY).issue(role, subject="tests", ttl_s=600, project=project)


def keep_run(folder: Path, settings: Mapping[str, Any], *, name: str = RUN, tell: Tell | None = None) -> None:
    """Puts a run that waits into the state folder of a service; `tell` writes its history."""
    with RunStorage(folder) as state:
        runs = RunRegistry(state, clock=lambda: NOW)
        run = TrainingRun(
            name=name,
            display_name="",
            algorithm="sft",
            settings_json=json.dumps(settings),
            policy=NO_POLICY,
            inputs={},
            create_time=NOW,
            step_count=9,
        )
        runs.add(replace(run, state=RunState.PAUSED))
        if tell is not None:
            tell(runs)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """Starts the algorithm service of a state folder, without what trains; yields its address."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(serving_keys(KeyService(KEY)))
        settings = AlgorithmServiceSettings(
            port=0, metrics_port=0, token=SecretStr(token(Role.SERVICE)), store_target=store, state_dir=folder
        )
        parts = await build(settings, stack)
        await parts.server.server.start()
        exchange = asyncio.create_task(parts.roles["gradient_exchange"].run(), name="exchange")
        try:
            yield f"127.0.0.1:{parts.server.port}"
        finally:
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)
            await parts.server.server.stop(None)


@asynccontextmanager
async def ranks(targets: Sequence[str], *, count: int = 2, **link: float) -> AsyncIterator[list[Member]]:
    """Joins ranks of the run to shards at these addresses."""
    given = GrpcLinkSettings.model_validate({"targets": tuple(targets), "lease_s": 3600.0, **link})
    settings = settings_named("topk")
    codec = make_codec(settings)
    assert isinstance(codec, SegmentCodec)
    layout = layout_of(settings, len(targets))
    connect = partial(open_channel, token=token(Role.SERVICE))
    members: list[Member] = []
    try:
        for rank in range(count):
            who = GrpcParticipant(
                training_run=RUN, rank=rank, world_size=count, layout=layout, codec=codec, codec_settings=settings
            )
            joined = await asyncio.to_thread(partial(GrpcLink.open, who, given, connect=connect))
            members.append(Member(joined, codec, layout, codec.new_state(torch.zeros(layout.size_of(0)))))
        yield members
    finally:
        for member in members:
            await asyncio.to_thread(member.link.kill)


async def exchange(members: Sequence[Member], number: int) -> None:
    """Takes one round on all ranks at once."""
    await asyncio.gather(*(asyncio.to_thread(member.exchange, number) for member in members))
