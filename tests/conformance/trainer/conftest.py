"""Trainers of every kind over one tiny model, opened once per module because processes with torch start slowly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings
from tests.support.algorithm.trainers import GROUPS, model_dir, rows, setup_of
from tests.support.algorithm.warm import here

__all__ = ["alone", "group", "model_dir", "rows", "setup"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(model_dir: Path) -> AsyncIterator[Trainer]:
    """Yields a trainer in this process: what the others are measured against."""
    thread = TorchThread(torch_threads=1)
    yield await InProcessTrainer.open(setup_of(model_dir, ComputeSettings()), thread=thread, device="cpu")
    thread.close()


SHORT = "fsdp2 and tensor, 4 ranks"
"""In the short form of the long tests: it splits weights in both ways."""


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=pytest.mark.long(short=each == SHORT)) for each in GROUPS]
)
def setup(request: pytest.FixtureRequest, model_dir: Path) -> TrainerSetup:
    """Returns what the group of a test is opened with."""
    return setup_of(model_dir, GROUPS[request.param])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(setup: TrainerSetup) -> AsyncIterator[RankGroupTrainer]:
    trainer = await RankGroupTrainer.open(setup, GroupOptions(cluster=here()))
    yield trainer
    await trainer.close()
