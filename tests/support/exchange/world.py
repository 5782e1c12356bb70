"""A server with the real servicer, and ranks with real links, over loopback sockets; time is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fulmen_algorithm.app import GRADIENT_EXCHANGE_SERVICE
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.transport.run_access import CallerRuns
from fulmen_exchange.codecs.codec import BLOCK, Bucket, Round, SegmentCodec, State
from fulmen_exchange.layout import Layout
from fulmen_exchange.links.grpc_link import GrpcLink
from fulmen_exchange.registry import load_codecs
from fulmen_exchange.server.servicer import ExchangeLimits, GradientExchangeServicer, add_exchange
from fulmen_exchange.server.shards import ServedShard
from fulmen_exchange.settings import CodecSettings
from fulmen_service_kit.rpc.server import RpcServer, build_server
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_service_kit.settings import KeyHolderSettings, settings_config
from tests.support.clock import Clock

RUN, OTHER_RUN = "projects/default/trainingRuns/1", "projects/default/trainingRuns/2"
LEASE_S = 3600.0
LIMIT_S = 30.0
ROWS = 3 * BLOCK // 16
RESIDUAL_AT_SHARD = {"ratio_down": 100.0}
"""Settings of `topk` with which shards keep what they do not send."""


class SampleSettings(KeyHolderSettings):
    service_name = "sample"
    model_config = settings_config("FULMEN_SAMPLE_")


@dataclass
class Site:
    """A server, and what it needs to be started again at the same port."""

    clock: Clock = field(default_factory=Clock)
    folder: Path | None = None
    over: Collection[str] = ()
    """Names of the runs that have ended."""
    limits: ExchangeLimits = field(default_factory=ExchangeLimits)
    options: dict[str, object] = field(default_factory=lambda: {"dev_mode": True})
    port: int = 0
    servicer: GradientExchangeServicer = field(init=False)
    server: RpcServer = field(init=False)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def is_over(self, training_run: str) -> bool:
        return training_run in self.over

    async def start(self) -> None:
        self.servicer = GradientExchangeServicer(
            runs=CallerRuns(cast(RunRegistry, self)),
            folder=self.folder,
            clock=self.clock,
            limits=self.limits,
        )
        self.server = build_server(
            SampleSettings(port=self.port, **self.options),  # type: ignore[arg-type]
            verifier=TokenVerifier(str(self.options.get("signing_key", ""))),
            service_names=[GRADIENT_EXCHANGE_SERVICE],
            register=lambda server: add_exchange(self.servicer, server),
        )
        self.port = self.server.port
        await self.server.server.start()

    async def stop(self) -> None:
        await self.server.server.stop(None)
        await self.servicer.end()

    async def tick(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await self.servicer.tick()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds on the server."""
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110  (it has no signal for what tests want to know)
                await asyncio.sleep(0.005)

    def shard(self, number: int = 0, *, run: str = RUN) -> ServedShard:
        return self.servicer._shards[run][number]

    def has_sent(self, rank: int, round_: int, *, shard: int = 0) -> bool:
        """True if a payload of a rank has begun to arrive; those of these tests have one chunk."""
        members = self.shard(shard).machine.members.all()
        return any(member.rank == rank and member.position[0] == round_ for member in members)


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[Site]:
    await site.start()
    try:
        yield site
    finally:
        await site.stop()


def settings_named(codec: str, **more: object) -> CodecSettings:
    return load_codecs()[codec].settings.model_validate({"codec": codec, **more})


def layout_of(settings: CodecSettings, shards: int, *, rows: int = ROWS + 3) -> Layout:
    """Returns the layout of a model with one bucket: three blocks and a rest, or so many rows of 16."""
    return Layout.of([("weight", nn.Parameter(torch.zeros(rows, 16)))], settings, shards=shards)


@dataclass
class Member:
    """A rank that encodes gradients, and what it has got."""

    link: GrpcLink
    codec: SegmentCodec
    layout: Layout
    state: State
    got: list[Tensor] = field(default_factory=list)
    accepted: list[list[bool]] = field(default_factory=list)

    def gradient(self, number: int) -> Tensor:
        return gradient_of(self.link.rank, number, self.layout.size_of(0))

    def exchange(self, number: int, *, also: Tensor | None = None) -> Tensor:
        """Takes one round, in the thread of the caller; returns the sum. `also` is summed before, as it is."""
        self.link.begin()
        if also is not None:
            self.link.all_reduce(also)
        size = self.layout.size_of(0)
        bucket = Bucket(index=0, flat=self.gradient(number), matrices=[], offsets=self.layout.offsets_of(0))
        round_ = Round(number=number, world_size=self.link.size, ratio=4.0, rank=self.link.rank, seed=7)
        payloads = self.codec.encode(bucket.flat, self.state, bucket.offsets, round_)
        sums = self.link.exchange({0: payloads}, round_)[0]
        for payload, begin, taken in zip(payloads, bucket.offsets, sums.accepted, strict=False):
            if not taken:
                self.codec.credit(payload, self.state, begin)
        out, back = torch.zeros(size), self.codec.reply()
        for reply, left, right in zip(sums.replies, bucket.offsets, bucket.offsets[1:], strict=False):
            back.add(reply, out[left:right])
        self.got.append(out)
        self.accepted.append(list(sums.accepted))
        return out


Join = Callable[..., Awaitable[Member]]


def gradient_of(rank: int, number: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * number + rank))
