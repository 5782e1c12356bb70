"""A run whose rewards tell it nothing says so; one that has learned all there is does not."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from fulmen_algorithm.domain.creation import RunDraft
from fulmen_algorithm.domain.run import RunState
from fulmen_algorithm.domain.signal_watch import STEPS
from tests.unit.algorithm_service.conftest import Service, created
from tests.unit.algorithm_service.model_world import World
from tests.unit.algorithm_service.test_crashes import live


@pytest.mark.parametrize(("first_that_differs", "told"), [(0, 0), (STEPS - 1, 0), (STEPS, 1), (100, 1)])
async def test_equal_rewards_from_the_beginning_are_told_once(
    first_that_differs: int, told: int, world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.in_order = True
    world.reward_of = lambda name: (
        float(name.endswith(".0")) if int(name.split("/")[2].partition(".")[0]) == first_that_differs else 1.0
    )
    settings = {**json.loads(grpo_draft.settings_json), "steps": 2 * STEPS, "prompts_per_step": 1, "group_size": 2}
    settings |= {"refill_limit": 0.0, "max_staleness": 0}
    inputs = {use: name for use, name in grpo_draft.inputs.items() if use != "validation_tasks"}
    service = open_service(world)
    run = await created(replace(grpo_draft, settings_json=json.dumps(settings), inputs=inputs), world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    notices = [n.message for n in entry.events.notices() if "all rewards are equal" in n.message]
    assert len(notices) == told
    spent = entry.events.steps()[-1].values
    assert {"spent_submit_seconds", "spent_checkpoint_seconds"} <= spent.keys()
