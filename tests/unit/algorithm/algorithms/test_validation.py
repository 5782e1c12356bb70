"""A failure in a validation never makes a policy look better."""

import pytest

from tests.support.algorithm.run_service import notices, with_settings


@pytest.mark.parametrize("algorithm", ["grpo", "rejection"])
async def test_a_rollout_that_failed_counts_as_failure_reward(algorithm, world, grpo_draft, carry_out):
    # Every other of six validation tasks fails, the others cost something.
    world.fails = lambda name: "validation/" in name and int(name.split("/")[-1].partition(".")[0]) % 2 == 0
    world.reward_of = lambda name: -1.0 if "validation/" in name else float(name.endswith(".0"))
    draft = with_settings(grpo_draft, algorithm=algorithm, steps=1, failure_reward=-5.0, max_staleness=None)
    entry = await carry_out(draft)
    assert entry.run.results["validation_accuracy"] == pytest.approx((3 * -1 + 3 * -5) / 6)
    assert entry.events.steps()[-1].values["validation_failed"] == 3
    assert any(
        "3 of 6 validation rollouts failed (AGENT_ERROR: 3); they count as -5. See why: `fulmen rollout show" in text
        for text in notices(entry)
    )
