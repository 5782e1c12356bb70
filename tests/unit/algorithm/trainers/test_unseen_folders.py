"""Ranks on machines that see none of the run's folders: files are sent, and everything ends as on one machine, bit for bit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fulmen_algorithm.cluster.port import Cluster
from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.elastic import ElasticTrainer
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2
from fulmen_algorithm.training.settings import BatchSettings, StepSettings
from tests.support.algorithm.joined_machines import Door, open_door
from tests.support.algorithm.trainers import model_dir, rows, setup_of, weights_of
from tests.support.algorithm.warm import here
from tests.support.machines import AVAILABLE, SERVICE, Machines

__all__ = ["model_dir", "rows"]

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="needs Linux, root, ip and nsenter"),
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(600),
]

STEP = StepSettings(token_budget=64, planned_steps=0, total_steps=20)


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Machines(2) as made:
        yield made


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "service/disk/run"
    made.mkdir(parents=True)
    # Calls name it in several ways.
    (tmp_path / "service/run").symlink_to(made)
    return tmp_path / "service/run"


@pytest.fixture
async def door(machines: Machines, tmp_path: Path) -> AsyncIterator[Door]:
    async with open_door(tmp_path / "door", host=SERVICE, silence_s=3.0) as opened:
        yield opened


async def join(door: Door, machines: Machines, place: Path, *hidden: Path, ranks: int = 2, **variables: str) -> None:
    """Has both machines join, each with an empty folder in place of some, and with a folder of its own for files."""
    mounts = " && ".join(f"mount -t tmpfs tmpfs {each}" for each in hidden)
    for machine in range(2):
        words = [*machines.within(machine), "unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
        files = str(place / f"gpu-{machine}")
        door.start_machine(f"gpu-{machine}", ranks=ranks, within=words, FULMEN_RANK_FILES_DIR=files, **variables)
    await door.until("gpu-0", "gpu-1")


async def train(trainer: Trainer, rows, *, step: int) -> list[float]:
    placed, batch = replace(STEP, planned_steps=2 * step), BatchSettings(minibatches=2)
    results = await trainer.train(rows, settings=placed, batch=batch, seed=step, current_version=3)
    return [result.loss for result in results]


async def learn(cluster: Cluster, setup: TrainerSetup, rows, folder: Path) -> tuple[object, ...]:
    """Trains two steps, and two more on new ranks that read the state of the first; returns all that comes of it."""
    losses = []
    for half in range(2):
        trainer = await RankGroupTrainer.open(setup, GroupOptions(cluster=cluster))
        try:
            if half:
                await trainer.read_state(folder / "state")
            losses += [await train(trainer, rows, step=2 * half + step) for step in range(2)]
            if not half:
                (folder / "state").mkdir(parents=True)
                await trainer.write_state(folder / "state")
        finally:
            weights = await weights_of(trainer, folder / f"weights-{half}")
            await trainer.close()
    state = {each.relative_to(folder): content(each) for each in (folder / "state").rglob("*") if each.is_file()}
    return losses, weights, state


def content(file: Path) -> object:
    """Returns a file's bytes; of tensors only these, since the order of what stands before them varies."""
    match file.suffix:
        case ".pt":
            return plain(torch.load(file, weights_only=True))
        case ".safetensors":
            return plain(load_file(file))
    return file.read_bytes()


def plain(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("parallel", [Ddp(ranks=4), pytest.param(Fsdp2(ranks=4, shard=2), marks=pytest.mark.long)])
async def test_machines_that_see_no_folder_learn_bit_for_bit_what_one_machine_learns(
    door, machines, model_dir, rows, run_dir, tmp_path, parallel
):
    await join(door, machines, tmp_path, run_dir, model_dir)
    setup = replace(setup_of(model_dir, ComputeSettings(parallel=parallel)), run_dir=run_dir)
    there = await learn(door.cluster, setup, rows, run_dir / "there")
    alone = await learn(here(), setup, rows, run_dir / "here")
    assert there == alone
    assert not list(tmp_path.glob("gpu-*/files/*.arriving"))


@pytest.mark.long
async def test_a_machine_that_is_killed_leaves_the_state_with_the_service_and_the_other_machine_goes_on(
    door, machines, model_dir, rows, run_dir, tmp_path
):
    await join(door, machines, tmp_path, run_dir, model_dir, ranks=1)
    elastic = Ddp(ranks=2, min_ranks=1, affinity="spread")
    setup = replace(setup_of(model_dir, ComputeSettings(parallel=elastic)), run_dir=run_dir)
    notices: list[str] = []
    trainer = await ElasticTrainer.open(
        setup, GroupOptions(cluster=door.cluster), notify=lambda severity, text: notices.append(text)
    )
    losses = [await train(trainer, rows, step=0)]
    machines.kill(1)
    losses += [await train(trainer, rows, step=step) for step in (1, 2)]
    weights = await weights_of(trainer, run_dir / "weights")
    await trainer.close()
    [notice] = notices
    assert "No step is lost: continuing with 1 of 2 ranks." in notice
    alone = await RankGroupTrainer.open(
        setup_of(model_dir, ComputeSettings(parallel=Ddp(ranks=2))), GroupOptions(cluster=here())
    )
    for step, found in enumerate(losses):
        assert found == pytest.approx(await train(alone, rows, step=step), abs=2e-6)
    assert weights.keys() == (await weights_of(alone, run_dir / "alone")).keys()
    await alone.close()


async def test_a_folder_without_a_model_is_named_as_the_service_knows_it(door, machines, model_dir, run_dir, tmp_path):
    empty = tmp_path / "service/empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    # One rank is started: two machines that prepare for more would take longer.
    await join(door, machines, tmp_path, empty, ranks=1, FULMEN_RANK_WARM_START="false")
    setup = replace(setup_of(empty, ComputeSettings(parallel=Ddp(ranks=1))), reference_dir=None, reward_dir=None)
    with pytest.raises(RunFailed, match=f"The folder {empty} contains no complete model"):
        await RankGroupTrainer.open(setup, GroupOptions(cluster=door.cluster))
