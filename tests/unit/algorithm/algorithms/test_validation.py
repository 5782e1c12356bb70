"""A failure in a validation never makes a policy look better."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import Service, created, live


@pytest.mark.parametrize("algorithm", ["grpo", "rejection"])
async def test_a_rollout_that_failed_counts_what_the_settings_say(
    algorithm: str, world: World, grpo_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    # Every other of six validation tasks fails, the others cost something.
    world.fails = lambda name: "validation/" in name and int(name.split("/")[-1].partition(".")[0]) % 2 == 0
    world.reward_of = lambda name: -1.0 if "validation/" in name else float(name.endswith(".0"))
    settings = {"steps": 1, "prompts_per_step": 2, "group_size": 3, "minibatches": 1, "failure_reward": -5.0}
    run = await created(replace(grpo_draft, algorithm=algorithm, settings_json=json.dumps(settings)), world)
    service = open_service(world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert entry.run.results["validation_accuracy"] == pytest.approx((3 * -1 + 3 * -5) / 6)
    assert entry.events.steps()[-1].values["validation_failed"] == 3
    assert any("3 of 6 validation rollouts failed; they count as -5." in n.message for n in entry.events.notices())
