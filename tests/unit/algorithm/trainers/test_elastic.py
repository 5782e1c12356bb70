"""Ranks die at every place of a step, and what is learned is what would have been learned without."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import GroupOrder, PlacementRefused, ProcessGroup, Welcome
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers import elastic, survivors
from fulmen_algorithm.trainers.elastic import ElasticTrainer
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2, ParallelSettings
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, OptimizerSettings, Sgd, StepSettings
from fulmen_exchange.registry import ExchangeSettings
from tests.support.algorithm.clusters import ENVIRONMENT
from tests.support.algorithm.mortal_rank import MODULE, VARIABLE
from tests.support.algorithm.trainers import model_dir, rows, weights_of
from tests.support.algorithm.warm import warm_modules
from tests.support.soak import long_but

__all__ = ["model_dir", "rows"]

pytestmark = [pytest.mark.xdist_group("trainers"), pytest.mark.timeout(600)]

STEP = StepSettings(token_budget=64, planned_steps=0, total_steps=20)
STEPS = 4
KINDS: dict[str, ParallelSettings] = {
    "ddp": Ddp(ranks=3, min_ranks=1),
    "fsdp2": Fsdp2(ranks=4, shard=2, min_ranks=2),
}
CODEC: ExchangeSettings = TypeAdapter(ExchangeSettings).validate_python(
    {"codec": "dgc", "ratio": 20.0, "dense_below": 16, "check_every": 1}
)
"""Residuals and momenta of each rank, and every round compares the weights of all ranks."""
PLACES = [
    "before the forward pass",
    "in the backward pass",
    "in the sum",
    "between the sum and the step",
    "after the decision",
    "before the answer",
    "in a checkpoint",
    "in a publication",
]
SHORT = ["in the sum", "after the decision", "in a checkpoint"]
"""Before and after the ranks agree on a step, and while its state is written."""


@dataclass
class Losing:
    """This machine, whose first group of ranks has mortal ones.

    Attributes:
        mortal: By rank: the place where it dies and the number of the optimiser step.
        rooms: Room for ranks, each time that it is asked for; the last one stays.
        started: Number of ranks of each group.
        refused: Numbers of ranks that do not see a folder.
    """

    mortal: Mapping[int, tuple[str, int]]
    modules: ModuleStarter
    rooms: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    refused: Collection[int] = ()

    async def plan(self, order: GroupOrder) -> str:
        return ""

    async def room(self, order: GroupOrder, *, without: Collection[str] = ()) -> int:
        room = self.rooms.pop(0) if len(self.rooms) > 1 else [*self.rooms, order.count][0]
        return min(room, order.count)

    async def start(self, order: GroupOrder, welcome: Welcome) -> ProcessGroup:
        self.started.append(order.count)
        if order.count in self.refused:
            raise PlacementRefused(["no folder"])
        if len(self.started) == 1:
            mortal = {**order.environment, **ENVIRONMENT, VARIABLE: json.dumps(self.mortal)}
            order = replace(order, module=MODULE, environment=mortal)
        return await LocalCluster(self.modules).start(order, welcome)


@pytest.fixture(scope="module")
def modules() -> ModuleStarter:
    return warm_modules()


@pytest.fixture(scope="module", params=KINDS)
def setup(request: pytest.FixtureRequest, model_dir: Path) -> TrainerSetup:
    optimizer = OptimizerSettings(learning_rate=1e-3, weight_decay=0.1)
    compute = ComputeSettings(parallel=KINDS[request.param])
    return TrainerSetup(model_dir=model_dir, optimizer=optimizer, seed=3, compute=compute)


async def learn(
    trainer: Trainer, rows: list[Row], folder: Path, *, steps: range = range(STEPS), minibatches: int = 2
) -> tuple[list[list[float]], dict[str, bytes]]:
    """Trains, with a checkpoint after each step; returns losses and weights."""
    losses, batch = [], BatchSettings(minibatches=minibatches)
    for step in steps:
        placed = replace(STEP, planned_steps=minibatches * step)
        results = await trainer.train(rows, settings=placed, batch=batch, seed=step, current_version=3)
        losses.append([result.loss for result in results])
        (folder / f"state-{step}").mkdir(parents=True)
        await trainer.write_state(folder / f"state-{step}")
    return losses, await weights_of(trainer, folder / "weights")


@pytest.fixture(scope="module")
def undisturbed(setup: TrainerSetup, modules: ModuleStarter, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what a group learns that loses nobody, computed once."""
    found: dict[str, Any] = {}

    async def learned(rows: list[Row]) -> Any:
        if not found:
            trainer = await RankGroupTrainer.open(setup, GroupOptions(cluster=LocalCluster(modules)))
            found["all"] = await learn(trainer, rows, tmp_path_factory.mktemp("undisturbed"))
            await trainer.close()
        return found["all"]

    return learned


async def open_elastic(setup: TrainerSetup, cluster: Losing, notices: list[str]) -> ElasticTrainer:
    return await ElasticTrainer.open(
        setup, GroupOptions(cluster=cluster), notify=lambda severity, text: notices.append(text)
    )


@pytest.mark.long(short=True)
@pytest.mark.parametrize("place", long_but(SHORT, PLACES))
async def test_a_rank_that_dies_anywhere_costs_no_step_and_doubles_none(
    place, setup, undisturbed, modules, rows, tmp_path
):
    # In the middle of the second call of two steps, or after it; files are written by rank 0, the last ones after step 8.
    step = 2 * STEPS if place == "in a publication" else 4
    cluster = Losing({0 if place.startswith("in a ") else 1: (place, step)}, modules)
    notices: list[str] = []
    trainer = await open_elastic(setup, cluster, notices)
    try:
        assert await learn(trainer, rows, tmp_path) == await undisturbed(rows)
    finally:
        await trainer.close()
    ranks = setup.compute.parallel.ranks
    assert cluster.started == [ranks, ranks]
    assert [text.partition("No step")[2] for text in notices] == [
        f" is lost: continuing with {ranks} of {ranks} ranks."
    ]


def with_codec(setup: TrainerSetup) -> TrainerSetup:
    """Returns the setup with residuals, which are each rank's own."""
    optimizer = OptimizerSettings(learning_rate=1e-2, rule=Sgd())
    return replace(setup, optimizer=optimizer, exchange=CODEC)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "taken"),
    [("in the backward pass", 2), ("in the sum", 2), ("between the sum and the step", 2), ("before the answer", 3)],
)
async def test_residuals_are_those_of_the_ranks_that_are_left_as_they_were_at_the_step(
    place, taken, setup, modules, rows, tmp_path
):
    """`taken`: the optimiser steps that all ranks that are left have taken, of which no rank that dies keeps one back."""
    setup = with_codec(setup)
    cluster = Losing({1: (place, 3)}, modules)
    trainer = await open_elastic(setup, cluster, [])
    try:
        found = await learn(trainer, rows, tmp_path / "lost", minibatches=1)
    finally:
        await trainer.close()
    assert len(cluster.started) == 2
    # The same from a checkpoint, without the files of the copy that the rank was part of.
    group = await RankGroupTrainer.open(setup, GroupOptions(cluster=LocalCluster(modules)))
    before, _ = await learn(group, rows, tmp_path / "before", steps=range(taken), minibatches=1)
    await group.close()
    state = tmp_path / f"before/state-{taken - 1}"
    of_copy = [1] if isinstance(setup.compute.parallel, Ddp) else [0, 1]
    for rank in of_copy:
        (state / f"exchange-{rank:05d}.pt").unlink()
    group = await RankGroupTrainer.open(setup, GroupOptions(cluster=LocalCluster(modules)))
    await group.read_state(state)
    after, weights = await learn(group, rows, tmp_path / "after", steps=range(taken, STEPS), minibatches=1)
    await group.close()
    assert found == (before + after, weights)


@pytest.mark.long
async def test_ranks_that_miss_the_decision_on_a_step_do_not_take_it_again(setup, modules, rows, tmp_path):
    # Nobody dies: all others have the decision and take the step. So the result is that of a group without losses.
    setup = with_codec(setup)
    cluster = Losing({1: ("without the decision", 3)}, modules)
    trainer = await open_elastic(setup, cluster, [])
    try:
        found = await learn(trainer, rows, tmp_path / "lost", minibatches=1)
    finally:
        await trainer.close()
    assert len(cluster.started) == 2
    group = await RankGroupTrainer.open(setup, GroupOptions(cluster=LocalCluster(modules)))
    assert found == await learn(group, rows, tmp_path / "undisturbed", minibatches=1)
    await group.close()


@pytest.mark.long(short=True)
async def test_a_group_goes_on_with_fewer_ranks_and_grows_again(
    setup, undisturbed, modules, rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(elastic, "GROW_EVERY_S", 0.0)
    parallel = setup.compute.parallel
    ranks, fewer = parallel.ranks, parallel.ranks - parallel.ranks_per_copy
    # At the start, after the loss, and at the next two borders of steps; what is no whole copy is not used.
    cluster = Losing({1: ("in the sum", 4)}, modules, rooms=[ranks, fewer, ranks - 1, ranks])
    notices: list[str] = []
    trainer = await open_elastic(setup, cluster, notices)
    try:
        losses, _ = await learn(trainer, rows, tmp_path)
    finally:
        await trainer.close()
    assert cluster.started == [ranks, fewer, ranks]
    assert [text.rpartition(": ")[2] for text in notices] == [
        f"continuing with {fewer} of {ranks} ranks.",
        f"continuing with {ranks} of {ranks} ranks.",
    ]
    for mine, yours in zip(losses, (await undisturbed(rows))[0], strict=True):
        assert mine == pytest.approx(yours, abs=2e-6)


async def test_without_a_whole_copy_the_trainer_is_lost_and_nothing_is_left(model_dir, modules, rows, tmp_path):
    optimizer = OptimizerSettings(learning_rate=1e-3)
    compute = ComputeSettings(parallel=Fsdp2(ranks=2, min_ranks=2))
    setup = TrainerSetup(model_dir=model_dir, optimizer=optimizer, seed=3, compute=compute, run_dir=tmp_path)
    trainer = await open_elastic(setup, Losing({1: ("in the sum", 2)}, modules), [])
    try:
        with pytest.raises(TrainerLost, match="ended"):
            await learn(trainer, rows, tmp_path / "learned")
    finally:
        await trainer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
async def test_a_rank_that_hangs_costs_no_step_when_the_deadline_of_the_call_has_passed(
    setup, undisturbed, modules, rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(survivors, "LEAVE_DEADLINE_S", 10.0)
    notices: list[str] = []
    trainer = await open_elastic(setup, Losing({}, modules), notices)
    try:
        first = await learn(trainer, rows, tmp_path, steps=range(1))
        trainer.group._options = replace(trainer.group._options, call_deadline_s=5.0)
        os.kill(trainer.group.pids[1], signal.SIGSTOP)
        losses, weights = await learn(trainer, rows, tmp_path / "after", steps=range(1, STEPS))
    finally:
        await trainer.close()
    assert (first[0] + losses, weights) == await undisturbed(rows)
    assert [text.partition(" No step")[0] for text in notices] == ["The trainer did not answer within 5 s."]


@pytest.mark.long
async def test_a_machine_that_cannot_be_used_leaves_a_growing_group_as_large_as_it_was(
    model_dir, modules, rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(elastic, "GROW_EVERY_S", 0.0)
    compute = ComputeSettings(parallel=Ddp(ranks=4, min_ranks=1))
    setup = TrainerSetup(model_dir=model_dir, optimizer=OptimizerSettings(learning_rate=1e-3), seed=3, compute=compute)
    notices: list[str] = []
    cluster = Losing({}, modules, rooms=[1, 3, 3, 1], refused=[3])
    trainer = await open_elastic(setup, cluster, notices)
    try:
        await learn(trainer, rows, tmp_path, steps=range(2))
    finally:
        await trainer.close()
    assert cluster.started == [1, 3, 1]
    assert notices[1:] == ["A group of 3 ranks cannot be used. The ranks of the trainer cannot run there: no folder."]


async def test_a_group_begins_with_as_many_ranks_as_there_is_room_for(model_dir, modules):
    optimizer = OptimizerSettings(learning_rate=1e-3)
    compute = ComputeSettings(parallel=Ddp(ranks=4, min_ranks=1))
    setup = TrainerSetup(model_dir=model_dir, optimizer=optimizer, seed=3, compute=compute)
    notices: list[str] = []
    trainer = await open_elastic(setup, Losing({}, modules, rooms=[1]), notices)
    assert len(trainer.group.pids) == 1
    await trainer.close()
    assert notices == ["There are resources for fewer ranks: continuing with 1 of 4 ranks."]
