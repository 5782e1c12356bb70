"""A tiny model, its rows, and what every trainer of the conformance suite begins with."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from fulmen_algorithm.policy.trainer import TrainerSetup
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
