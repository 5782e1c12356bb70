"""A run whose rewards tell it nothing says so; one that has learned all there is does not."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen_algorithm.algorithms.monitors import STEPS
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.training.checkpoints import CheckpointStore
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, created, live


def small(draft: RunDraft, **more: object) -> RunDraft:
    """Returns a run of one group of two for each step, without validation."""
    settings = {**json.loads(draft.settings_json), "prompts_per_step": 1, "group_size": 2}
    settings |= {"refill_limit": 0.0, "max_staleness": 0, **more}
    inputs = {use: name for use, name in draft.inputs.items() if use != "validation_tasks"}
    return replace(draft, settings_json=json.dumps(settings), inputs=inputs)


def differs_in(index: int) -> Callable[[str], float]:
    """Returns rewards that are equal in all groups but one."""
    return lambda name: float(name.endswith(".0")) if index_of(name) == index else 1.0


def index_of(rollout: str) -> int:
    """Takes the index of its group out of a rollout's name."""
    return int(rollout.split("/")[-1].partition(".")[0])


@pytest.mark.parametrize(("first_that_differs", "told"), [(0, 0), (STEPS - 1, 0), (STEPS, 1), (100, 1)])
async def test_equal_rewards_from_the_beginning_are_told_once(
    first_that_differs: int, told: int, world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.in_order = True
    world.reward_of = differs_in(first_that_differs)
    service = open_service(world)
    run = await created(small(grpo_draft, steps=2 * STEPS), world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    notices = [n.message for n in entry.events.notices() if "all rewards are equal" in n.message]
    assert len(notices) == told
    spent = entry.events.steps()[-1].values
    assert {"spent_submit_seconds", "spent_checkpoint_seconds"} <= spent.keys()


async def test_a_run_that_has_trained_before_a_restart_says_nothing(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service], tmp_path: Path
) -> None:
    world.in_order = True
    world.reward_of = differs_in(0)
    world.crashes = Crashes(at_call=16)
    service = open_service(world)
    run = await created(small(grpo_draft, steps=4 * STEPS, checkpoint_every=1), world)
    service.runs.add(run)
    assert not await live(service, run, world.crashes)
    newest = CheckpointStore(directory=tmp_path / "state/runs/small/checkpoints").listed()[-1]
    assert 1 <= newest.progress["step"] <= 3 * STEPS, "it is to go on for long enough after it has trained"
    world.crashes, world.changed = Crashes(), asyncio.Event()
    service = open_service(world)
    assert await live(service, run, world.crashes)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert not any("all rewards are equal" in notice.message for notice in entry.events.notices())
