"""Rejection sampling imitates the chosen rollouts alone, token for token, and uses every group once."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen_algorithm.algorithms.rejection import LOST_STEPS
from fulmen_algorithm.algorithms.sampling import supervised_rows
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, created, live
from tests.support.soak import long_after
from tests.support.training import check_books, read_consumed

SETTINGS = {"steps": 3, "prompts_per_step": 2, "group_size": 4, "minibatches": 2, "validate_every": 3}
KEEPS = [
    {"kind": "best", "count": 2},
    {"kind": "threshold", "min_reward": 1.0},
    {"kind": "threshold", "min_reward": 1.0, "max_per_group": 1},
]


@pytest.mark.parametrize("trial", long_after(2, range(6)))
async def test_the_chosen_rollouts_are_imitated_wherever_the_process_is_killed(
    trial: int, world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service], tmp_path: Path
) -> None:
    keep = KEEPS[trial % 3]
    settings = json.dumps({**SETTINGS, "keep": keep})
    chance = random.Random(trial)
    world.chance, world.failure_rate, world.answer_tokens = random.Random(trial), 0.2, 5
    run = await created(replace(grpo_draft, algorithm="rejection", settings_json=settings), world)
    service = open_service(world)
    service.runs.add(run)
    for life in range(4):
        at_call = chance.randrange(1, 18) if trial >= 3 and life < 3 else None
        world.crashes = Crashes(at_call=at_call, after_effect=chance.random() < 0.5)
        if await live(service, run, world.crashes):
            break
        world.changed = asyncio.Event()
        service = open_service(world)
    final = service.runs.entry(run.name).run
    assert final.state is RunState.SUCCEEDED, final.failure_message
    assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(final.results)
    if trial < 3:  # else the metrics of a publication may have died with the process
        published = {"publish_seconds", "publish_bytes", "publish_bytes_full", "publish_pause_ms"}
        steps = service.runs.entry(run.name).events.steps()
        assert [step.step for step in steps if published <= step.values.keys()] == [1, 2, 3]
    lines = read_consumed(tmp_path / "state/runs/small")
    check_books(lines, [group.group_id for group in world.feed], steps=3)
    rewards = {each.name: each.reward for group in world.feed for each in group.rollouts}
    for line in lines:
        scored = sorted((r for n in line["rollouts"] if (r := rewards[n]) is not None), reverse=True)
        chosen = (
            scored[: keep["count"]] if "count" in keep else [r for r in scored if r >= 1.0][: keep.get("max_per_group")]
        )
        assert sorted((rewards[name] for name in line["trained"]), reverse=True) == chosen


async def test_a_step_in_which_all_agents_failed_fails_the_run(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.failure_rate = 1.0
    inputs = {use: name for use, name in grpo_draft.inputs.items() if use != "validation_tasks"}
    draft = replace(grpo_draft, algorithm="rejection", settings_json=json.dumps(SETTINGS), inputs=inputs)
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    message = service.runs.entry(run.name).run.failure_message
    assert message.startswith(
        "No rollout of 2 groups could be used (AGENT_ERROR: 8). See why: `fulmen rollout show projects/default/rollouts/"
    )


async def test_steps_that_the_machines_fail_are_told_and_in_the_end_fail_the_run(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.failure_rate, world.failure = 1.0, "INFRA"
    inputs = {use: name for use, name in grpo_draft.inputs.items() if use != "validation_tasks"}
    settings = json.dumps({**SETTINGS, "steps": 2 * LOST_STEPS})
    draft = replace(grpo_draft, algorithm="rejection", settings_json=settings, inputs=inputs)
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    entry = service.runs.entry(run.name)
    assert f"The same in {LOST_STEPS} steps in a row" in entry.run.failure_message
    told = [n.message for n in entry.events.notices() if "trains on nothing" in n.message]
    assert len(told) == LOST_STEPS - 1
    assert all("(INFRA: 8)" in text and "`fulmen runners`" in text for text in told)


def test_rows_hold_the_tokens_that_were_sampled() -> None:
    sampled = TokenSequence(
        token_ids=(4, 7, 9, 2), loss_mask=(False, False, True, True), logprobs=(0.0, 0.0, -1.0, -2.0),
        policy_versions=(0, 0, 3, 3),
    )  # fmt: skip
    read = TokenSequence(token_ids=(4,), loss_mask=(False,), logprobs=(0.0,), policy_versions=(0,))
    rows = supervised_rows("projects/default/rollouts/1", RolloutTrajectory(sequences=(sampled, read)))
    assert [(row.token_ids, row.loss_mask, row.advantages) for row in rows] == [
        (sampled.token_ids, sampled.loss_mask, (0.0, 0.0, 1.0, 1.0))
    ]
    assert supervised_rows("projects/default/rollouts/1", RolloutTrajectory(sequences=(sampled,), unusable="cut")) == []
    assert supervised_rows("projects/default/rollouts/1", None) == []
