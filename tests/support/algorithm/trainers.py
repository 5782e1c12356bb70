"""A tiny model, its rows, and what every trainer of the conformance suite begins with."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import OptimizerSettings, Schedule
from fulmen_algorithm.weights.publishing import WeightsOrder
from tests.support.algorithm.models import small_model

GROUPS = {
    "ddp, 4 ranks": ComputeSettings(parallel=Ddp(ranks=4)),
    "fsdp2, 2 ranks": ComputeSettings(parallel=Fsdp2(ranks=2), gradient_checkpointing=True),
    "fsdp2, 2 copies in 2 parts": ComputeSettings(parallel=Fsdp2(ranks=4, shard=2)),
    "tensor, 2 copies of 2 ranks": ComputeSettings(parallel=Ddp(ranks=4, tensor=2)),
    "fsdp2 and tensor, 4 ranks": ComputeSettings(parallel=Fsdp2(ranks=4, tensor=2), gradient_checkpointing=True),
    "context, 2 copies of 2 ranks": ComputeSettings(parallel=Ddp(ranks=4, context=2)),
    "fsdp2 and context, 4 ranks": ComputeSettings(parallel=Fsdp2(ranks=4, context=2), gradient_checkpointing=True),
}


def setup_of(model_dir: Path, compute: ComputeSettings) -> TrainerSetup:
    """Returns what every trainer of the suite begins with."""
    optimizer = OptimizerSettings(
        learning_rate=1e-3, weight_decay=0.1, schedule=Schedule.LINEAR, warmup_steps=2, total_steps=20
    )
    return TrainerSetup(
        model_dir=model_dir, optimizer=optimizer, seed=3, compute=compute, reference_dir=model_dir, reward_dir=model_dir
    )


async def weights_of(trainer: Trainer, folder: Path) -> dict[str, bytes]:
    """Writes a trainer's model and reads the files."""
    await trainer.write_weights(folder, WeightsOrder())
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return made_rows()


def made_rows() -> list[Row]:
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
