"""Ranks that are of no use end. That none outlives a killed service: tests/integration/algorithm_service."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from fulmen_algorithm.domain.failure import RunFailed
from fulmen_algorithm.trainers.rank_group import GroupOptions, RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from tests.conformance.trainer.conftest import setup_of

pytestmark = pytest.mark.xdist_group("trainers")


async def test_a_folder_without_a_model_is_refused_and_leaves_no_process(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(RunFailed, match="holds no complete model"):
        await RankGroupTrainer.open(setup_of(tmp_path, ComputeSettings(parallel=Ddp(ranks=1))), GroupOptions())
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
