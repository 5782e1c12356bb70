"""Ranks on machines that join a run, which are network namespaces: what is not like the service is refused, and faults end in time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.ids import DEFAULT_PROJECT
from fulmen_algorithm.cluster.port import Affinity, GroupOrder, Wishes
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from fulmen_algorithm.training.settings import BatchSettings, StepResult, StepSettings
from fulmen_exchange.links.settings import ServerAccess
from fulmen_exchange.registry import load_codecs
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.algorithm.clusters import DEADLINE_S, ENVIRONMENT
from tests.support.algorithm.joined_machines import Door, open_door
from tests.support.algorithm.trainers import model_dir, rows, setup_of
from tests.support.machines import AVAILABLE, SERVICE, Machines
from tests.support.processes import all_ended
from tests.support.store.running import SIGNING_KEY

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
    with Machines(3) as made:
        yield made


@pytest.fixture
async def door(machines: Machines, tmp_path: Path) -> AsyncIterator[Door]:
    async with open_door(tmp_path / "service", host=SERVICE, silence_s=SILENCE_S) as opened:
        yield opened


def setup(model_dir: Path, ranks: int) -> TrainerSetup:
    return setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=ranks)))


async def train(trainer: Trainer, rows, *, step: int = 0) -> list[float]:
    return [result.loss for result in await results_of(trainer, rows, step=step)]


async def results_of(trainer: Trainer, rows, *, step: int) -> list[StepResult]:
    placed = replace(STEP, planned_steps=2 * step)
    batch = BatchSettings(minibatches=2)
    async with asyncio.timeout(DEADLINE_S):
        return await trainer.train(rows, settings=placed, batch=batch, seed=step, current_version=3)


async def join(door: Door, machines: Machines, *which: int, **variables: str) -> None:
    for machine in which:
        door.start_machine(f"gpu-{machine}", ranks=1, within=machines.within(machine), **variables)
    await door.until(*(f"gpu-{machine}" for machine in which))


async def test_a_plan_waits_for_machines_and_says_what_to_run_where(door, machines):
    wishes = Wishes(affinity=Affinity.OWN_NODES)
    order = GroupOrder(module="any", count=2, environment=ENVIRONMENT, wishes=wishes)
    planning = asyncio.create_task(door.cluster.plan(order))
    # Nothing is run, so that nobody needs torch.
    cold = {"FULMEN_RANK_WARM_START": "false"}
    await join(door, machines, 0, **cold)
    assert not planning.done()
    door.start_machine("gpu-1", ranks=1, within=machines.within(1), **cold)
    assert await planning == "2 processes: 1 on gpu-0, 1 on gpu-1"
    none, one = door.notices
    assert none.startswith(
        "Waiting for machines: none has joined; the cluster has no nodes. On each machine run `fulmen-rank"
    )
    assert "--role rank --project default --run small" in none
    assert one.startswith(
        "Waiting for machines: joined are gpu-0 (1); 2 nodes are requested (own_nodes), but only 1 can take"
    )


async def test_a_machine_with_another_torch_is_refused_and_told_why(door, machines, tmp_path):
    named = tmp_path / "elsewhere/torch-0.1.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    # Where Python looks first.
    (named.parent / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(named.parent)!r})\n")
    other = ["sh", "-c", f'PYTHONPATH={named.parent}:$PYTHONPATH exec "$@"', "sh"]
    machine = door.start_machine("gpu-0", within=[*machines.within(0), *other], FULMEN_RANK_WARM_START="false")
    assert await asyncio.to_thread(machine.wait, DEADLINE_S) == 1
    [notice] = door.runs.entry(door.run.name).events.notices()
    assert notice.message.startswith("The machine gpu-0 cannot run ranks: build has torch 0.1, the service ")


async def test_of_a_machine_that_does_not_see_the_runs_folder_it_is_said(door, machines, tmp_path):
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {tmp_path}/service && exec "$@"', "sh"]
    door.start_machine("gpu-0", within=[*machines.within(0), *hidden], FULMEN_RANK_WARM_START="false")
    await door.until("gpu-0")
    entry = door.runs.entry(door.run.name)
    [notice] = entry.events.notices()
    assert notice.message == (
        "The machine gpu-0 has joined: it runs up to 2 ranks. Files are transferred to it and from it, because it does not see"
        f" {entry.files.folder.absolute()}."
    )


@pytest.mark.long(short=True)
async def test_of_machines_that_no_longer_reach_each_other_one_is_left_out_and_another_takes_its_place(
    door, machines, model_dir, rows
):
    await join(door, machines, 0, 1)
    options = GroupOptions(cluster=door.cluster)
    trainer = await RankGroupTrainer.open(setup(model_dir, 2), options)
    before = await train(trainer, rows)
    machines.part(0, 1)
    told = rf"gpu-1 \(10.78.0.2\) is left out: it and 10.78.0.1 could not reach each other for {2 * SILENCE_S:g} s"
    with pytest.raises(TrainerLost, match=told):
        await train(trainer, rows, step=1)
    door.start_machine("gpu-2", ranks=1, within=machines.within(2))
    # It could be used, but a machine that both reach takes its place.
    await door.until("gpu-0", "gpu-1", "gpu-2")
    again = await RankGroupTrainer.open(setup(model_dir, 2), options)
    assert await train(again, rows) == before
    assert [machine.node.name for machine in door.machines.of(door.run.name) if machine.is_free] == ["gpu-1"]
    await again.close()


@pytest.mark.long
async def test_a_machine_that_is_stopped_is_missed_and_comes_back(door, machines, model_dir, rows):
    await join(door, machines, 0, 1)
    options = GroupOptions(cluster=door.cluster)
    trainer = await RankGroupTrainer.open(setup(model_dir, 2), options)
    before = await train(trainer, rows)
    stopped = machines.processes(1)
    # They still accept connections, and say nothing.
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TrainerLost, match=rf"gpu-1 \(10.78.0.2\) sent nothing for {SILENCE_S:g} s"):
        await train(trainer, rows, step=1)
    await door.until("gpu-0")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    # Its ranks end; itself joins again.
    await all_ended(trainer.pids)
    await door.until("gpu-0", "gpu-1")
    again = await RankGroupTrainer.open(setup(model_dir, 2), options)
    assert await train(again, rows) == before
    await again.close()


async def test_a_machine_goes_on_when_its_stream_breaks_and_ends_with_the_run(door, machines, model_dir, rows):
    await join(door, machines, 0)
    trainer = await RankGroupTrainer.open(setup(model_dir, 1), GroupOptions(cluster=door.cluster))
    before = await train(trainer, rows)
    [machine] = door.machines.of(door.run.name)
    machine.leave()
    async with asyncio.timeout(DEADLINE_S):
        while door.machines.of(door.run.name) in ([], [machine]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    [again] = door.machines.of(door.run.name)
    assert not again.is_free
    assert await train(trainer, rows, step=1) != before
    await trainer.close()
    await door.until("gpu-0")
    door.runs.move(door.run.name, RunState.CANCELLED)
    assert await asyncio.to_thread(door.started[0].wait, DEADLINE_S) == 0


@pytest.mark.long(short=True)
async def test_sites_over_slow_lines_train_with_an_outer_loop_through_the_service(
    door, machines, model_dir, rows, tmp_path
):
    await join(door, machines, 0, 1)
    for machine in (0, 1):
        machines.slow_down(machine, mbit=4.0)
    token = tmp_path / "token"
    token.write_text(TokenSigner(SIGNING_KEY).issue(Role.SERVICE, subject="ranks", ttl_s=600, project=DEFAULT_PROJECT))
    outer = {"kind": "outer", "steps": 2, "momentum": 0.5}
    asked = {
        "codec": "qsgd",
        "check_every": 1,
        "dense_below": 16,
        "outer": outer,
        "link": {"kind": "grpc", "targets": [door.target]},
    }
    sites = replace(
        setup(model_dir, 2),
        exchange=load_codecs()["qsgd"].settings.model_validate(asked),
        server_access=ServerAccess(training_run=door.run.name, token_file=str(token), tls={door.target: None}),
        training_run=door.run.name,
    )
    trainer = await RankGroupTrainer.open(sites, GroupOptions(cluster=door.cluster))
    before = await trainer.logprobs(rows, settings=STEP)
    exchanged = [result.exchange for step in range(3) for result in await results_of(trainer, rows, step=step)]
    # Every second step is sent, compressed, and the check compares the weights of both sites each time.
    assert [figures.get("exchange_sent_bytes", 0) > 0 for figures in exchanged] == [False, True] * 3
    assert all(figures["exchange_ratio"] > 2 for figures in exchanged[1::2])
    assert await trainer.logprobs(rows, settings=STEP) != before
    await trainer.close()
