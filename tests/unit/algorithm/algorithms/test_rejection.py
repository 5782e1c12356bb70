"""Rejection sampling imitates the chosen rollouts alone, token for token, and uses every group once."""

import random

import pytest

from fulmen_algorithm.algorithms.rejection import LOST_STEPS
from fulmen_algorithm.algorithms.sampling import supervised_rows
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.run_service import kills, notices, run_folder, with_settings
from tests.support.algorithm.training import check_books, read_consumed
from tests.support.soak import long_after

SETTINGS = {
    "algorithm": "rejection",
    "steps": 3,
    "group_size": 4,
    "minibatches": 2,
    "validate_every": 3,
    "checkpoint_every": None,
    "max_staleness": None,
}
KEEPS = [
    {"kind": "best", "count": 2},
    {"kind": "threshold", "min_reward": 1.0},
    {"kind": "threshold", "min_reward": 1.0, "max_per_group": 1},
]


@pytest.mark.parametrize("trial", long_after(2, range(6)))
async def test_the_chosen_rollouts_are_imitated_wherever_the_process_is_killed(
    trial, world, grpo_draft, carry_out, tmp_path
):
    keep = KEEPS[trial % 3]
    world.chance, world.failure_rate, world.answer_tokens = random.Random(trial), 0.2, 5
    draft = with_settings(grpo_draft, **SETTINGS, keep=keep)
    entry = await carry_out(draft, killed=kills(random.Random(trial), calls=18) if trial >= 3 else ())
    final = entry.run
    assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(final.results)
    if trial < 3:  # else the metrics of a publication may have died with the process
        published = {"publish_seconds", "publish_bytes", "publish_bytes_full", "publish_pause_ms"}
        steps = entry.events.steps()
        assert [step.step for step in steps if published <= step.values.keys()] == [1, 2, 3]
    lines = read_consumed(run_folder(tmp_path))
    check_books(lines, [group.group_id for group in world.feed], steps=3)
    rewards = {each.name: each.reward for group in world.feed for each in group.rollouts}
    for line in lines:
        scored = sorted((r for n in line["rollouts"] if (r := rewards[n]) is not None), reverse=True)
        chosen = (
            scored[: keep["count"]] if "count" in keep else [r for r in scored if r >= 1.0][: keep.get("max_per_group")]
        )
        assert sorted((rewards[name] for name in line["trained"]), reverse=True) == chosen


async def test_a_step_in_which_all_agents_failed_fails_the_run(world, grpo_draft, carry_out):
    world.failure_rate = 1.0
    entry = await carry_out(with_settings(grpo_draft, validated=False, **SETTINGS), state=RunState.FAILED)
    assert entry.run.failure_message.startswith(
        "No rollout of 2 groups could be used (AGENT_ERROR: 8). See why: `fulmen rollout show projects/default/rollouts/"
    )


async def test_steps_lost_to_the_machines_are_reported_and_in_the_end_fail_the_run(world, grpo_draft, carry_out):
    world.failure_rate, world.failure = 1.0, "INFRA"
    draft = with_settings(grpo_draft, validated=False, **{**SETTINGS, "steps": 2 * LOST_STEPS})
    entry = await carry_out(draft, state=RunState.FAILED)
    assert f"The same in {LOST_STEPS} steps in a row" in entry.run.failure_message
    warnings = [text for text in notices(entry) if "trains on nothing" in text]
    assert len(warnings) == LOST_STEPS - 1
    assert all("(INFRA: 8)" in text and "`fulmen runners`" in text for text in warnings)


def test_rows_hold_the_tokens_that_were_sampled():
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
