"""Groups that the infrastructure fails are refilled, as long as there is hope."""

import json
from collections.abc import Callable
from dataclasses import replace

from fulmen_algorithm.algorithms.batches import LOST_STEPS, LOST_TO_TELL
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import Service, created, live

PROMPTS = 4


def with_settings(draft: RunDraft, **settings: object) -> RunDraft:
    """Changes settings of a run, and takes its validation away."""
    inputs = {use: name for use, name in draft.inputs.items() if use != "validation_tasks"}
    return replace(draft, settings_json=json.dumps({**json.loads(draft.settings_json), **settings}), inputs=inputs)


async def test_a_run_whose_rollouts_are_all_lost_to_the_machines_fails_and_says_where_to_look(
    world: World, grpo_draft: RunDraft, open_service: Callable[..., Service]
) -> None:
    world.failure_rate, world.failure = 1.0, "INFRA"
    service = open_service(world)
    run = await created(with_settings(grpo_draft, prompts_per_step=PROMPTS, max_staleness=0), world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    entry = service.runs.entry(run.name)
    lost = LOST_STEPS * PROMPTS
    assert entry.run.state is RunState.FAILED
    assert f"failed {lost} groups in a row (INFRA: {3 * lost})" in entry.run.failure_message
    assert "`fulmen runners`" in entry.run.failure_message
    assert "`fulmen rollout show projects/default/rollouts/train/" in entry.run.failure_message
    told = [n.message for n in entry.events.notices() if f"failed {LOST_TO_TELL} groups" in n.message]
    assert len(told) == 1
    assert lost <= sum(name.startswith("train/") for name in world.groups) <= lost + PROMPTS


async def test_a_group_that_works_gives_hope_again(
    world: World, grpo_draft: RunDraft, open_service: Callable[..., Service]
) -> None:
    row = 2 * LOST_TO_TELL - 1
    world.in_order, world.failure = True, "LEASE_LOST"
    world.fails = lambda name: int(name.split("/")[-1].partition(".")[0]) % (row + 1) < row
    world.reward_of = lambda name: float(name.endswith(".0"))
    service = open_service(world)
    draft = with_settings(grpo_draft, prompts_per_step=1, steps=2, group_size=2, max_staleness=0)
    run = await created(draft, world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert sum("groups in a row" in notice.message for notice in entry.events.notices()) == 2
    assert len(world.groups) == 2 * (row + 1)
