"""With a quorum, ranks that compute slowly are not waited for in any part of a round."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fulmen_exchange.layout import Layout
from fulmen_exchange.links.grpc_link import GrpcLink, GrpcParticipant
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.metrics import RankReport, gather
from fulmen_exchange.ranks import Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.registry import make_codec
from tests.support.exchange.world import LEASE_S, RUN, Site, settings_named

QUORUM = {"quorum": 0.6, "min_wait_s": 0.2, "max_wait_s": 5.0, "lease_s": LEASE_S}
RANKS = 3


class Trainer:
    """A rank with a model of a matrix and a vector, whose gradients are its number and the round's."""

    def __init__(self, site: Site, rank: int, codec: str) -> None:
        torch.manual_seed(0)
        self.parameters = dict(nn.Linear(64, 80).named_parameters())
        self.ranks = Ranks(rank=rank, world_size=RANKS)
        settings = settings_named(codec, policy={"kind": "fixed", "warmup_rounds": 0}, check_every=0)
        link = GrpcLinkSettings.model_validate({"targets": (site.target,), **QUORUM})
        who = GrpcParticipant(
            training_run=RUN, rank=rank, world_size=RANKS, codec=make_codec(settings), codec_settings=settings,
            layout=Layout.of(list(self.parameters.items()), settings, shards=1),
        )  # fmt: skip
        self.link = GrpcLink.open(who, link)
        self.reducer = CodecReducer.open(
            settings, parameters=self.parameters, link=self.link, seed=1, optimizer="adamw"
        )

    def step(self, value: float) -> list[Tensor]:
        for parameter in self.parameters.values():
            parameter.grad = torch.full_like(parameter, value)
        self.reducer.reduce(list(self.parameters.values()), self.ranks, StepInfo())
        return [parameter.grad.clone() for parameter in self.parameters.values() if parameter.grad is not None]


async def ticked(site: Site, *steps: asyncio.Task[list[Tensor]]) -> list[list[Tensor]]:
    """Lets time pass on the server until steps have ended."""
    async with asyncio.timeout(60.0):
        while not all(step.done() for step in steps):
            await site.tick(1.0)
            await asyncio.sleep(0.02)
    return [step.result() for step in steps]


@pytest.mark.parametrize("codec", ["qsgd", "double_quantization"])
async def test_a_rank_that_computes_slowly_holds_up_no_call_and_what_it_sends_late_is_summed_next(
    codec: str, site: Site
) -> None:
    trainers = await asyncio.gather(*(asyncio.to_thread(Trainer, site, rank, codec) for rank in range(RANKS)))
    *fast, slow = trainers

    def start(trainer: Trainer, value: float) -> asyncio.Task[list[Tensor]]:
        return asyncio.create_task(asyncio.to_thread(partial(trainer.step, value)))

    try:
        first = await asyncio.gather(*(start(each, 1.0) for each in trainers))
        second = await ticked(site, *(start(each, 2.0) for each in fast))  # without a call of the slow one
        late = [await start(slow, 4.0)]
        third = await asyncio.gather(*(start(each, 0.0) for each in trainers))
    finally:
        for trainer in trainers:
            await asyncio.to_thread(trainer.link.kill)

    for gradients, value in ((first[0], 3.0), (second[0], 6.0), (third[0], 4.0)):
        for gradient in gradients:
            torch.testing.assert_close(gradient, torch.full_like(gradient, value), rtol=0.02, atol=0.0)
    for same in (first, [*second, *late], third):
        assert all(torch.equal(a, b) for other in same[1:] for a, b in zip(same[0], other, strict=True))
    assert sum(trainer.link.missed_sums for trainer in trainers) == 0


async def test_a_rank_that_leaves_between_the_statistics_of_a_round_and_its_sums_is_not_waited_for(site: Site) -> None:
    trainers = await asyncio.gather(*(asyncio.to_thread(Trainer, site, rank, "topk") for rank in range(RANKS)))
    *others, leaving = trainers

    def leave() -> None:
        leaving.link.begin()
        report = RankReport(norm=1.0, compute_s=0.0, present=leaving.parameters.keys(), means={})
        told = gather(report, list(leaving.parameters), leaving.link, torch.device("cpu"))
        assert told.finite
        leaving.link.close()

    try:
        calls = [asyncio.create_task(asyncio.to_thread(partial(each.step, 1.0))) for each in others]
        await asyncio.gather(asyncio.to_thread(leave), *calls)
        first = [call.result() for call in calls]
        second = await asyncio.gather(*(asyncio.to_thread(partial(each.step, 1.0)) for each in others))
    finally:
        for trainer in trainers:
            await asyncio.to_thread(trainer.link.kill)

    for sums in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))
    assert [trainer.link.size for trainer in others] == [2, 2]
    for gradient, *_ in (first[0], second[0]):
        assert set(gradient.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}, "whole parts of two ranks in two rounds"
