"""A run ends the same wherever the process was killed: no group is skipped, none is used twice."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, check, created, live
from tests.support.soak import long_after

TRIALS = 20


@pytest.mark.parametrize("trial", long_after(4, range(TRIALS)))
async def test_a_run_that_is_killed_again_and_again_uses_every_group_once(
    trial: int,
    world: World,
    grpo_draft: RunDraft,
    open_service: Callable[[World], Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(trial)
    world.chance = chance
    world.failure_rate = 0.1 * (trial % 3)
    run = await created(grpo_draft, world)
    service = open_service(world)
    service.runs.add(run)
    lives = 0
    while True:
        lives += 1
        # A life without a crash makes about 36 calls.
        crash_at = chance.randrange(1, 28) if lives <= 5 else None
        world.crashes = Crashes(at_call=crash_at, after_effect=chance.random() < 0.5)
        if await live(service, run, world.crashes):
            break
        world.changed = asyncio.Event()
        service = open_service(world)
    final = service.runs.entry(run.name).run
    assert final.state is RunState.SUCCEEDED, final.failure_message
    assert final.step == 4
    assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(final.results)
    check(tmp_path, world)
    assert world.served is not None
    assert world.served.path.exists()
    assert final.policy_version == world.served.name


async def test_without_a_crash_the_same_books_are_kept(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service], tmp_path: Path
) -> None:
    run = await created(grpo_draft, world)
    service = open_service(world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    assert service.runs.entry(run.name).run.state is RunState.SUCCEEDED
    check(tmp_path, world)
    assert world.served_versions == [1, 2, 3, 4, 5]
    steps = service.runs.entry(run.name).events.steps()
    assert [s.step for s in steps] == [0, 1, 2, 3, 4]
    assert "validation_accuracy" in steps[0].values
    assert "reward_mean" in steps[1].values
