"""Runs of `rloo`, `reinforce_pp` and `ppo` over a model of the other services."""

import random
from dataclasses import replace

import pytest

from fulmen_algorithm.rollouts.groups import FinishedRollout
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import with_settings

VALUE_METRICS = {"value_loss", "value_grad_norm", "value_explained"}


class TwoDimensions(World):
    def _rollout(self, name: str) -> FinishedRollout:
        rewards = {(dimension, None, b""): float(self.chance.randrange(2)) for dimension in ("correct", "style")}
        return replace(super()._rollout(name), reward=None, rewards=rewards)


@pytest.mark.parametrize("algorithm", ["rloo", "reinforce_pp", "ppo"])
async def test_a_run_trains_to_its_end(algorithm, world, grpo_draft, carry_out):
    entry = await carry_out(with_settings(grpo_draft, algorithm=algorithm, group_size=None))
    sizes = {spec.size for name, spec in world.groups.items() if name.startswith("train/")}
    assert sizes == ({8} if algorithm == "rloo" else {1})
    assert (set(entry.events.steps()[-1].values) >= VALUE_METRICS) is (algorithm == "ppo")


async def test_one_version_is_the_best_also_of_negative_rewards(world, grpo_draft, carry_out):
    world.reward_of = lambda name: -1.0 - len(name) % 2
    await carry_out(with_settings(grpo_draft, steps=1, refill_limit=0))
    assert world.aliases["resources/policy.tiny/aliases/best"] >= 1


async def test_steps_that_change_no_weights_take_the_validation_of_their_version(world, grpo_draft, carry_out):
    world.reward_of = lambda name: 1.0  # no group tells one answer from another
    entry = await carry_out(with_settings(grpo_draft, steps=2, refill_limit=0, validate_every=1))
    assert {name.split("/")[1] for name in world.groups if name.startswith("validation/")} == {"1"}
    assert entry.run.results["validation_accuracy_before"] == entry.run.results["validation_accuracy_after"] == 1.0


async def test_a_run_with_a_critic_resumes_after_the_process_was_killed(world, grpo_draft, carry_out):
    world.chance = random.Random(7)
    killed = [Crashes(at_call=20), Crashes(at_call=20)]
    await carry_out(with_settings(grpo_draft, algorithm="ppo", group_size=None, checkpoint_every=1), killed=killed)
    assert killed[0].killed.is_set()


async def test_rewards_of_two_dimensions_are_what_a_run_trains_on_and_is_validated_by(world, grpo_draft, carry_out):
    world = TwoDimensions(chance=random.Random(0), resources=world.resources)
    weighed = {"weights": {"correct": 1.0, "style": 0.5}, "normalise": "gdpo"}
    entry = await carry_out(with_settings(grpo_draft, rewards=weighed, group_size=4), world=world)
    assert 0.0 < entry.run.results["validation_accuracy"] <= 1.5
    assert {"reward_correct_mean", "reward_style_mean"} <= set(entry.events.steps()[-1].values)
