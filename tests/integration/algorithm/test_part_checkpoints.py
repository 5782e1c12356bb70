"""A rank dies in the middle of a save: the checkpoint before is complete, and a new group goes on from it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from fulmen_algorithm.persistence.checkpoints import CheckpointStore
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2
from fulmen_algorithm.training.settings import StepSettings
from tests.support.algorithm.trainers import model_dir, rows, setup_of
from tests.support.algorithm.warm import here

__all__ = ["model_dir", "rows"]

pytestmark = [
    pytest.mark.xdist_group("trainers"),
    pytest.mark.timeout(300),  # the first one waits until a group of processes with torch has started
]

STEP = StepSettings(token_budget=64)
DEADLINE_S = 120.0


async def there(path: Path) -> None:
    """Waits until a file exists."""
    async with asyncio.timeout(DEADLINE_S):
        while not path.exists():  # noqa: ASYNC110  (another process makes it)
            await asyncio.sleep(0.01)


async def test_a_rank_that_is_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(model_dir, rows, tmp_path):
    store = CheckpointStore(directory=tmp_path)
    setup = setup_of(model_dir, ComputeSettings(parallel=Fsdp2(ranks=2)))
    options = GroupOptions(cluster=here())
    group = await RankGroupTrainer.open(setup, options)
    await group.train_supervised(rows, settings=STEP)
    folder = store.begin()
    await group.write_state(folder)
    store.complete(folder, {"step": 1})
    expected = await group.train_supervised(rows, settings=STEP)

    folder = store.begin()
    # The second rank waits here for somebody who reads: the first one has written its file meanwhile.
    moments = folder / "moments-00000/exp_avg"
    moments.mkdir(parents=True)
    os.mkfifo(moments / "shard-00002-model-00001-of-00001.safetensors")
    saving = asyncio.create_task(group.write_state(folder))
    await there(moments / "shard-00001-model-00001-of-00001.safetensors")
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(TrainerLost):
        await saving

    [damaged, found] = [store.newest().damaged, store.newest().checkpoint]
    assert damaged == ()
    assert found is not None
    assert found.progress == {"step": 1}
    again = await RankGroupTrainer.open(setup, options)
    await again.read_state(found.path)
    resumed = await again.train_supervised(rows, settings=STEP)
    assert (resumed.loss, resumed.grad_norm) == (expected.loss, expected.grad_norm)
    folder = store.begin()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".writing")] == [folder.name]
    await again.write_state(folder)
    assert store.complete(folder, {"step": 2}).sequence == 2
    await again.close()
