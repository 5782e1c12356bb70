"""Groups that the infrastructure fails are refilled, up to a limit."""

from fulmen_algorithm.algorithms.batches import LOST_STEPS, LOST_TO_WARN
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.run_service import notices, with_settings

PROMPTS = 4


async def test_a_run_whose_rollouts_are_all_lost_to_the_machines_fails_and_says_where_to_look(
    world, grpo_draft, carry_out
):
    world.failure_rate, world.failure = 1.0, "INFRA"
    draft = with_settings(grpo_draft, validated=False, prompts_per_step=PROMPTS, max_staleness=0)
    entry = await carry_out(draft, state=RunState.FAILED)
    lost = LOST_STEPS * PROMPTS
    assert f"failed {lost} groups in a row (INFRA: {3 * lost})" in entry.run.failure_message
    assert "`fulmen runners`" in entry.run.failure_message
    assert "`fulmen rollout show projects/default/rollouts/train/" in entry.run.failure_message
    assert sum(f"failed {LOST_TO_WARN} groups" in text for text in notices(entry)) == 1
    assert lost <= sum(name.startswith("train/") for name in world.groups) <= lost + PROMPTS


async def test_a_group_that_succeeds_resets_the_count_of_lost_groups(world, grpo_draft, carry_out):
    row = 2 * LOST_TO_WARN - 1
    world.in_order, world.failure = True, "LEASE_LOST"
    world.fails = lambda name: int(name.split("/")[-1].partition(".")[0]) % (row + 1) < row
    world.reward_of = lambda name: float(name.endswith(".0"))
    draft = with_settings(grpo_draft, validated=False, prompts_per_step=1, steps=2, group_size=2, max_staleness=0)
    entry = await carry_out(draft)
    assert sum("groups in a row" in text for text in notices(entry)) == 2
    assert len(world.groups) == 2 * (row + 1)
