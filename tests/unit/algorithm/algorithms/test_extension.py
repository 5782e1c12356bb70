"""The example of an algorithm of one file works as docs/extending.md says, and wherever it is killed."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, created, live
from tests.support.soak import long_after
from tests.support.training import check_books, read_consumed

SETTINGS = {"steps": 4, "prompts_per_step": 2, "n": 3, "checkpoint_every": 2}
LINES_ALLOWED = 50


@pytest.fixture
def draft(grpo_draft: RunDraft) -> RunDraft:
    """Returns a small run of the example."""
    inputs = {use: name for use, name in grpo_draft.inputs.items() if use != "validation_tasks"}
    return replace(grpo_draft, algorithm="best_of_n", settings_json=json.dumps(SETTINGS), inputs=inputs)


@pytest.mark.parametrize("trial", long_after(2, range(5)))
async def test_the_example_uses_every_group_once_wherever_it_is_killed(
    trial: int, world: World, draft: RunDraft, open_service: Callable[[World], Service], tmp_path: Path
) -> None:
    chance = world.chance = random.Random(trial)
    world.failure_rate = 0.2
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    for life in range(4):
        # The first trial is not killed; a life without a crash makes about 20 calls.
        at_call = chance.randrange(1, 18) if trial and life < 3 else None
        world.crashes = Crashes(at_call=at_call, after_effect=chance.random() < 0.5)
        if await live(service, run, world.crashes):
            break
        world.changed = asyncio.Event()
        service = open_service(world)
    final = service.runs.entry(run.name).run
    assert final.state is RunState.SUCCEEDED, final.failure_message
    lines = read_consumed(tmp_path / "state/runs/small")
    check_books(lines, [group.group_id for group in world.feed], steps=4)
    rewards = {each.name: each.reward for group in world.feed for each in group.rollouts}
    for line in lines:
        scored = [rewards[name] for name in line["rollouts"] if rewards[name] is not None]
        assert [rewards[name] for name in line["trained"]] == ([max(scored)] if scored else [])
    # The policy of each step makes the rollouts of the next one.
    assert set(world.sampled_with.values()) == {1, 2, 3, 4} or trial
    assert final.policy_version == "resources/policy.tiny/versions/5" or trial


def test_the_example_is_as_short_as_is_said(repository_root: Path) -> None:
    lines = (repository_root / "examples/best_of_n/algorithm.py").read_text().splitlines()
    assert len(lines) <= LINES_ALLOWED
