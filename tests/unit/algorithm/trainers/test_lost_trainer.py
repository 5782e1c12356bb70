"""A run outlives its trainer: it resumes from its newest checkpoint, and no group is skipped or used twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from fulmen_algorithm.policy.trainer import Trainer, TrainerSetup
from fulmen_algorithm.runs.execution import MAX_TRAINERS_LOST
from fulmen_algorithm.runs.failure import TrainerLost
from fulmen_algorithm.runs.ports import Notify
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.trainers.in_process import InProcessTrainer, TorchThread
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from tests.support.algorithm.run_service import check, created, live
from tests.support.algorithm.warm import here


class Mortal:
    """A group of ranks one of which is killed in the middle of a training step."""

    def __init__(self, group: RankGroupTrainer, *, at_call: int) -> None:
        self._group = group
        self._left = at_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    async def train(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left:
            return await self._group.train(*args, **kwargs)
        rank = self._group.pids[1]
        # It stops first, so that the other is in the middle of the step when it dies.
        os.kill(rank, signal.SIGSTOP)
        step = asyncio.create_task(self._group.train(*args, **kwargs))
        await asyncio.sleep(0)
        os.kill(rank, signal.SIGKILL)
        return await step


@pytest.mark.long(short=True)
async def test_a_run_resumes_when_a_rank_is_killed_in_the_middle_of_a_step(world, grpo_draft, open_service, tmp_path):
    settings = {**json.loads(grpo_draft.settings_json), "parallel": {"kind": "ddp", "ranks": 2}}
    run = await created(replace(grpo_draft, settings_json=json.dumps(settings)), world)
    thread = TorchThread(torch_threads=1)
    opened: list[TrainerSetup] = []

    async def open_trainer(setup: TrainerSetup, notify: Notify) -> Trainer:
        opened.append(setup)
        if len(opened) == 1:
            # The checkpoint of step 2 is there, and step 3 is lost.
            return Mortal(await RankGroupTrainer.open(setup, GroupOptions(cluster=here())), at_call=4)
        return await InProcessTrainer.open(setup, thread=thread, device="cpu")

    service = open_service(world, open_trainer)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    thread.close()
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert [setup.compute.parallel.ranks for setup in opened] == [2, 2]
    check(tmp_path, world)
    texts = [notice.message for notice in entry.events.notices()]
    assert sum("resumes from its newest checkpoint" in text for text in texts) == 1
    assert "Resuming from the checkpoint of step 2." in texts


async def test_a_run_whose_trainers_are_all_lost_fails_and_says_why(world, grpo_draft, open_service):
    run = await created(grpo_draft, world)
    opened = 0

    async def open_trainer(setup: TrainerSetup, notify: Notify) -> Trainer:
        nonlocal opened
        opened += 1
        raise TrainerLost("Rank 0 of the trainer has ended.")

    service = open_service(world, open_trainer)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    final = service.runs.entry(run.name).run
    assert final.state is RunState.FAILED
    assert "Rank 0 of the trainer has ended." in final.failure_message
    assert opened == MAX_TRAINERS_LOST
