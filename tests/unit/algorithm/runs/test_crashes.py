"""A run ends the same wherever the process was killed: no group is skipped, none is used twice."""

import random

import pytest

from tests.support.algorithm.run_service import check, kills
from tests.support.soak import long_after


@pytest.mark.parametrize("trial", long_after(3, range(20)))
async def test_a_run_that_is_killed_again_and_again_uses_every_group_once(
    trial, world, grpo_draft, carry_out, tmp_path
):
    world.chance = random.Random(trial)
    world.failure_rate = 0.1 * (trial % 3)
    # A life without a crash makes about 36 calls.
    final = (await carry_out(grpo_draft, killed=kills(world.chance, calls=28, lives=5))).run
    assert final.step == 4
    assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(final.results)
    check(tmp_path, world)
    assert world.served is not None
    assert world.served.path.exists()
    assert final.policy_version == world.served.name


async def test_without_a_crash_the_same_books_are_kept(world, grpo_draft, carry_out, tmp_path):
    world.reward_of = lambda name: float(name.endswith(".0"))
    entry = await carry_out(grpo_draft)
    check(tmp_path, world)
    assert world.served_versions == [1, 2, 3, 4, 5]
    steps = entry.events.steps()
    assert [s.step for s in steps] == [0, 1, 2, 3, 4]
    assert "validation_accuracy" in steps[0].values
    assert "reward_mean" in steps[1].values
