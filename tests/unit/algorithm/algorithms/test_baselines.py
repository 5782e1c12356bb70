"""Runs of `rloo`, `reinforce_pp` and `ppo` over a model of the other services."""

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from fulmen_algorithm.rollouts.groups import FinishedRollout
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, created, live

VALUE_FIGURES = {"value_loss", "value_grad_norm", "value_explained"}


def drafted(draft: RunDraft, algorithm: str, **values: object) -> RunDraft:
    """Returns the draft of a run of another algorithm; a group has the size that is its default."""
    settings = {key: value for key, value in json.loads(draft.settings_json).items() if key != "group_size"}
    return replace(draft, algorithm=algorithm, settings_json=json.dumps({**settings, **values}))


class TwoDimensions(World):
    """A world whose grader scores in two dimensions."""

    def _rollout(self, name: str) -> FinishedRollout:
        rewards = {(dimension, None, b""): float(self.chance.randrange(2)) for dimension in ("correct", "style")}
        return replace(super()._rollout(name), reward=None, rewards=rewards)


@pytest.mark.parametrize("algorithm", ["rloo", "reinforce_pp", "ppo"])
async def test_a_run_trains_to_its_end(
    algorithm: str, world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    run = await created(drafted(grpo_draft, algorithm), world)
    service = open_service(world)
    service.runs.add(run)

    assert await live(service, run, world.crashes)

    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    sizes = {spec.size for name, spec in world.groups.items() if name.startswith("train/")}
    assert sizes == ({8} if algorithm == "rloo" else {1})
    metrics = entry.events.steps()[-1].values
    assert (set(metrics) >= VALUE_FIGURES) is (algorithm == "ppo")


async def test_of_rewards_below_zero_too_one_version_is_the_best(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.reward_of = lambda name: -1.0 - len(name) % 2
    run = await created(drafted(grpo_draft, "grpo", steps=1, refill_limit=0), world)
    service = open_service(world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    assert world.aliases["resources/policy.tiny/aliases/best"] >= 1


async def test_a_run_with_a_critic_goes_on_after_the_process_was_killed(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.chance = random.Random(7)
    run = await created(drafted(grpo_draft, "ppo", checkpoint_every=1), world)
    service = open_service(world)
    service.runs.add(run)
    lives = 0
    while True:
        lives += 1
        world.crashes = Crashes(at_call=20 if lives <= 2 else None)
        if await live(service, run, world.crashes):
            break
        service = open_service(world)
    assert lives > 1
    assert service.runs.entry(run.name).run.state is RunState.SUCCEEDED


async def test_rewards_of_two_dimensions_are_what_a_run_trains_on_and_is_validated_by(
    world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world = TwoDimensions(chance=random.Random(0), resources=world.resources)
    weighed = {"weights": {"correct": 1.0, "style": 0.5}, "normalise": "gdpo"}
    run = await created(drafted(grpo_draft, "grpo", rewards=weighed, group_size=4), world)
    service = open_service(world)
    service.runs.add(run)

    assert await live(service, run, world.crashes)

    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert 0.0 < entry.run.results["validation_accuracy"] <= 1.5
    assert {"reward_correct_mean", "reward_style_mean"} <= set(entry.events.steps()[-1].values)
