"""Trainers of every kind over one tiny model, each opened once for the whole module: processes with torch are dear."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.rank_group import GroupOptions, RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import OptimizerSettings, Schedule

GROUPS = {
    "ddp, 4 ranks": ComputeSettings(parallel=Ddp(ranks=4)),
    "fsdp2, 2 ranks": ComputeSettings(parallel=Fsdp2(ranks=2), gradient_checkpointing=True),
}


def build_model(repository_root: Path, folder: Path, *, hidden: int) -> Path:
    """Builds the arithmetic example's model at a size of choice."""
    path = repository_root / "examples/arithmetic/make_model.py"
    spec = importlib.util.spec_from_file_location("arithmetic_make_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(str(folder), 0, hidden=hidden, layers=2, heads=2, mlp=2 * hidden)
    return folder


def setup_of(model_dir: Path, compute: ComputeSettings) -> TrainerSetup:
    """Returns what every trainer of the suite begins with."""
    optimizer = OptimizerSettings(
        learning_rate=1e-3, weight_decay=0.1, schedule=Schedule.LINEAR, warmup_steps=2, total_steps=20
    )
    return TrainerSetup(model_dir=model_dir, optimizer=optimizer, seed=3, compute=compute, reference_dir=model_dir)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, repository_root: Path) -> Path:
    """Returns a model's folder."""
    return build_model(repository_root, tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Returns rows of many lengths, some of one rollout."""
    chance = random.Random(5)
    made = []
    for index in range(24):
        completion = [chance.randrange(6, 25) for _ in range(chance.randrange(1, 12))]
        row = row_from_completion(
            rollout_id=f"rollout-{index // 2}",
            prompt_ids=[chance.randrange(25) for _ in range(chance.randrange(1, 9))],
            completion_ids=completion,
            logprobs=[-chance.uniform(0.5, 4.0) for _ in completion],
            advantage=chance.uniform(-1, 1),
            version=index % 3,
        )
        made.append(row)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(model_dir: Path) -> AsyncIterator[Trainer]:
    """Yields a trainer in this process: what the others are measured against."""
    thread = TorchThread(torch_threads=1)
    yield await InProcessTrainer.open(setup_of(model_dir, ComputeSettings()), thread=thread, device="cpu")
    thread.close()


QUICK = "fsdp2, 2 ranks"


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[QUICK, *(pytest.param(each, marks=pytest.mark.long(short=True)) for each in GROUPS if each != QUICK)],
)
async def group(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[RankGroupTrainer]:
    """Yields a trainer in a group of ranks."""
    trainer = await RankGroupTrainer.open(setup_of(model_dir, GROUPS[request.param]), GroupOptions())
    yield trainer
    await trainer.close()
