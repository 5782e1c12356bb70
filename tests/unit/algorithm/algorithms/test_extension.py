"""The example of an algorithm in one file works as docs/extending.md says, also when it is killed."""

import json
import random
from dataclasses import replace

import pytest

from tests.support.algorithm.run_service import kills, run_folder
from tests.support.algorithm.training import check_books, read_consumed
from tests.support.soak import long_after

SETTINGS = {"steps": 4, "prompts_per_step": 2, "n": 3, "checkpoint_every": 2}
LINES_ALLOWED = 50


@pytest.mark.parametrize("trial", long_after(2, range(5)))
async def test_the_example_uses_every_group_once_wherever_it_is_killed(trial, world, grpo_draft, carry_out, tmp_path):
    inputs = {use: name for use, name in grpo_draft.inputs.items() if use != "validation_tasks"}
    draft = replace(grpo_draft, algorithm="best_of_n", settings_json=json.dumps(SETTINGS), inputs=inputs)
    world.chance, world.failure_rate = random.Random(trial), 0.2
    # The first trial is not killed; a life without a crash makes about 20 calls.
    final = (await carry_out(draft, killed=kills(world.chance, calls=18) if trial else ())).run
    lines = read_consumed(run_folder(tmp_path))
    check_books(lines, [group.group_id for group in world.feed], steps=4)
    rewards = {each.name: each.reward for group in world.feed for each in group.rollouts}
    for line in lines:
        scored = [rewards[name] for name in line["rollouts"] if rewards[name] is not None]
        assert [rewards[name] for name in line["trained"]] == ([max(scored)] if scored else [])
    # The policy of each step makes the rollouts of the next one.
    assert set(world.sampled_with.values()) == {1, 2, 3, 4} or trial
    assert final.policy_version == "resources/policy.tiny/versions/5" or trial


def test_the_example_is_as_short_as_the_docs_say(repository_root):
    lines = (repository_root / "examples/best_of_n/algorithm.py").read_text().splitlines()
    assert len(lines) <= LINES_ALLOWED
