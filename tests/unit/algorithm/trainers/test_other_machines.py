"""Ranks on other machines, which are network namespaces: they learn the same, and a lost machine loses and doubles nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.port import Cluster
from fulmen_algorithm.cluster.remote import RemoteCluster
from fulmen_algorithm.cluster.wire import NODE_VARIABLE
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed, TrainerLost
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.trainers.elastic import ElasticTrainer
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import BatchSettings, StepSettings
from tests.support.algorithm.clusters import DEADLINE_S, Hosts
from tests.support.algorithm.run_service import check, created, live
from tests.support.algorithm.trainers import model_dir, rows, setup_of, weights_of
from tests.support.algorithm.warm import here
from tests.support.machines import AVAILABLE, SERVICE, Machines
from tests.support.processes import all_ended

__all__ = ["model_dir", "rows"]

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="needs Linux, root, ip and nsenter"),
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(600),
]

SILENCE_S = 3.0
STEP = StepSettings(token_budget=64, planned_steps=0, total_steps=20)


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Machines(2) as made:
        yield made


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate(GateOptions(host=SERVICE, silence_s=SILENCE_S))
    yield made
    made.close()


@pytest.fixture
def cluster(machines: Machines, gate: Gate) -> Cluster:
    return RemoteCluster(Hosts([machines.within(0), machines.within(1)]), gate, start_deadline_s=DEADLINE_S)


async def train(trainer: Trainer, rows: list[Row], *, step: int = 0) -> list[float]:
    placed = replace(STEP, planned_steps=2 * step)
    batch = BatchSettings(minibatches=2)
    results = await trainer.train(rows, settings=placed, batch=batch, seed=step, current_version=3)
    return [result.loss for result in results]


async def learn(cluster: Cluster, setup: TrainerSetup, rows: list[Row], folder: Path) -> tuple[object, ...]:
    trainer = await RankGroupTrainer.open(setup, GroupOptions(cluster=cluster))
    try:
        losses = [await train(trainer, rows, step=step) for step in range(3)]
        return losses, await weights_of(trainer, folder)
    finally:
        await trainer.close()


@pytest.mark.long
async def test_ranks_on_two_machines_learn_bit_for_bit_what_those_of_one_learn(cluster, model_dir, rows, tmp_path):
    setup = replace(setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=4))), run_dir=tmp_path)
    there = await learn(cluster, setup, rows, tmp_path / "there")
    assert there == await learn(here(), setup, rows, tmp_path / "here")


@pytest.mark.long
async def test_a_machine_that_is_cut_off_in_mid_step_is_noticed_and_leaves_nothing(cluster, machines, model_dir, rows):
    trainer = await RankGroupTrainer.open(
        setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=2))), GroupOptions(cluster=cluster)
    )
    await train(trainer, rows)
    machines.cut_off(1)
    with pytest.raises(TrainerLost, match=f"sent nothing for {SILENCE_S:g} s"):
        async with asyncio.timeout(DEADLINE_S):
            await train(trainer, rows, step=1)
    # The machine itself notices, too, that nobody waits for it.
    await all_ended(machines.processes(0) + machines.processes(1))


ELASTIC = Ddp(ranks=2, min_ranks=1, cpus=2)
"""A rank on each of two machines with two CPUs; one is enough."""


def hosts(machines: Machines) -> Hosts:
    """Returns both machines, with names by which a lost one is left out."""
    places = [machines.within(machine) for machine in range(2)]
    return Hosts(places, variables=[{NODE_VARIABLE: f"host-{machine}"} for machine in range(2)])


@pytest.mark.long
async def test_the_rank_that_is_left_leaves_a_sum_with_a_silent_machine_and_goes_on(
    machines, gate, model_dir, rows, tmp_path
):
    cluster = RemoteCluster(hosts(machines), gate, start_deadline_s=DEADLINE_S)
    setup = replace(setup_of(model_dir, ComputeSettings(parallel=ELASTIC)), run_dir=tmp_path)
    notices: list[str] = []
    trainer = await ElasticTrainer.open(
        setup, GroupOptions(cluster=cluster), notify=lambda severity, text: notices.append(text)
    )
    losses = [await train(trainer, rows)]
    machines.cut_off(1)
    losses += [await train(trainer, rows, step=step) for step in (1, 2)]
    await trainer.close()
    assert len(notices) == 1
    assert f"sent nothing for {SILENCE_S:g} s" in notices[0]
    assert "No step is lost: continuing with 1 of 2 ranks." in notices[0]
    alone = await RankGroupTrainer.open(
        setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=2))), GroupOptions(cluster=here())
    )
    for step, found in enumerate(losses):
        assert found == pytest.approx(await train(alone, rows, step=step), abs=2e-6)
    await alone.close()


@pytest.mark.long
async def test_of_two_machines_that_are_parted_one_is_left_out_and_the_other_loses_no_step(
    machines, gate, model_dir, rows, tmp_path
):
    cluster = RemoteCluster(hosts(machines), gate, start_deadline_s=DEADLINE_S)
    setup = replace(setup_of(model_dir, ComputeSettings(parallel=ELASTIC)), run_dir=tmp_path)
    notices: list[str] = []
    trainer = await ElasticTrainer.open(
        setup, GroupOptions(cluster=cluster), notify=lambda severity, text: notices.append(text)
    )
    losses = [await train(trainer, rows)]
    machines.part(0, 1)
    losses += [await train(trainer, rows, step=step) for step in (1, 2)]
    await trainer.close()
    [notice] = notices
    assert notice == (
        f"The trainer has ended: host-1 (10.78.0.2) is left out: it and 10.78.0.1 could not reach each other for"
        f" {2 * SILENCE_S:g} s. No step is lost: continuing with 1 of 2 ranks."
    )
    alone = await RankGroupTrainer.open(
        setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=2))), GroupOptions(cluster=here())
    )
    for step, found in enumerate(losses):
        assert found == pytest.approx(await train(alone, rows, step=step), abs=2e-6)
    await alone.close()


async def test_a_folder_that_a_machine_does_not_share_is_refused_with_each_rank_that_misses_it(
    machines, gate, model_dir, tmp_path
):
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {tmp_path} && exec "$@"', "sh"]
    hosts = Hosts([machines.within(0), [*machines.within(1), *hidden]])
    setup = replace(setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=2))), run_dir=tmp_path)
    cluster = RemoteCluster(hosts, gate, start_deadline_s=DEADLINE_S)
    with pytest.raises(RunFailed) as refused:
        await RankGroupTrainer.open(setup, GroupOptions(cluster=cluster))
    assert f"(10.78.0.2) does not see {tmp_path} as the service does" in str(refused.value)
    assert "(10.78.0.1)" not in str(refused.value)


async def test_a_machine_with_another_torch_is_refused(machines, gate, model_dir, tmp_path):
    named = tmp_path / "torch-0.1.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    # Where Python looks first.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n")
    other = ["sh", "-c", f'PYTHONPATH={tmp_path}:$PYTHONPATH exec "$@"', "sh"]
    hosts = Hosts([machines.within(0), [*machines.within(1), *other]])
    cluster = RemoteCluster(hosts, gate, start_deadline_s=DEADLINE_S)
    with pytest.raises(RunFailed, match=r"rank 1 has torch 0\.1, the service ") as refused:
        await RankGroupTrainer.open(
            setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=2))), GroupOptions(cluster=cluster)
        )
    assert "rank 0" not in str(refused.value)


class Mortal:
    """A group of ranks one machine of which is killed in the middle of a training step."""

    def __init__(self, group: Trainer, machines: Machines, *, at_call: int) -> None:
        self._group, self._machines, self._left = group, machines, at_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    async def train(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left:
            return await self._group.train(*args, **kwargs)
        # It is cut off first, so that the others are in the middle of the step when its processes die.
        self._machines.cut_off(1)
        step = asyncio.create_task(self._group.train(*args, **kwargs))
        await asyncio.sleep(0)
        self._machines.kill(1)
        return await step


@pytest.mark.long(short=True)
async def test_a_run_resumes_when_a_machine_is_lost_in_the_middle_of_a_step(
    world, grpo_draft, open_service, machines, gate, tmp_path
):
    settings = {**json.loads(grpo_draft.settings_json), "parallel": {"kind": "ddp", "ranks": 2, "cluster": "machines"}}
    run = await created(replace(grpo_draft, settings_json=json.dumps(settings)), world, clusters=["machines"])
    opened: list[TrainerSetup] = []

    async def open_trainer(setup: TrainerSetup, notify: Notify) -> Trainer:
        opened.append(setup)
        # The machine does not come back.
        places = [machines.within(0), machines.within(1)] if len(opened) == 1 else [machines.within(0)]
        cluster = RemoteCluster(Hosts(places), gate, start_deadline_s=DEADLINE_S)
        group = await RankGroupTrainer.open(setup, GroupOptions(cluster=cluster))
        # The checkpoint of step 2 is there, and step 3 is lost.
        return Mortal(group, machines, at_call=4) if len(opened) == 1 else group

    service = open_service(world, open_trainer)
    service.runs.add(run)
    assert await live(service, run, world.crashes, limit_s=300)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert len(opened) == 2
    check(tmp_path, world)
    texts = [notice.message for notice in entry.events.notices()]
    assert sum("sent nothing for" in text and "resumes from its newest checkpoint" in text for text in texts) == 1
    assert "Resuming from the checkpoint of step 2." in texts


@pytest.mark.long
async def test_a_run_goes_on_with_the_machine_that_is_left_and_loses_no_step(
    world, grpo_draft, open_service, machines, gate, tmp_path
):
    parallel = {**ELASTIC.model_dump(mode="json"), "cluster": "machines"}
    settings = {**json.loads(grpo_draft.settings_json), "parallel": parallel}
    run = await created(replace(grpo_draft, settings_json=json.dumps(settings)), world, clusters=["machines"])
    cluster = RemoteCluster(hosts(machines), gate, start_deadline_s=DEADLINE_S)
    opened: list[TrainerSetup] = []

    async def open_trainer(setup: TrainerSetup, notify: Notify) -> Trainer:
        opened.append(setup)
        trainer = await ElasticTrainer.open(setup, GroupOptions(cluster=cluster), notify=notify)
        return Mortal(trainer, machines, at_call=4)

    service = open_service(world, open_trainer)
    service.runs.add(run)
    assert await live(service, run, world.crashes, limit_s=300)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert len(opened) == 1
    check(tmp_path, world)
    texts = [notice.message for notice in entry.events.notices()]
    assert sum("No step is lost: continuing with 1 of 2 ranks." in text for text in texts) == 1
    assert not any("checkpoint of step" in text for text in texts)
