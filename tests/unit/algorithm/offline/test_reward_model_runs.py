"""Runs of `reward_model` learn which of two answers is better."""

import json
import random
from dataclasses import replace

import pytest

from fulmen_algorithm.runs.creation.rules import RunDraft
from tests.support.algorithm.model_services import World
from tests.support.algorithm.preferences import add_preferences
from tests.support.algorithm.run_service import kills

PAIRS = 20
LEARNS = {
    "steps": 12, "batch_size": 16, "report_every": 4, "checkpoint_every": 3, "learning_rate": 0.01, "held_out": 0.2,
    "schedule": "constant", "warmup_steps": 0,
}  # fmt: skip


def pairs_draft(draft: RunDraft, world: World, **settings: object) -> RunDraft:
    name = add_preferences(world, PAIRS)
    policy = replace(draft.policy, name="judge")
    return replace(
        draft,
        algorithm="reward_model",
        policy=policy,
        inputs={"preferences": name},
        settings_json=json.dumps({**LEARNS, **settings}),
    )


@pytest.mark.parametrize(
    "settings", [{}, {"margin": 1.0, "centring": 0.1}, {"lora": {"rank": 8}, "learning_rate": 0.02, "steps": 16}]
)
async def test_answers_to_prompts_that_were_held_out_are_told_apart(settings, world, sft_draft, carry_out):
    entry = await carry_out(pairs_draft(sft_draft, world, **settings))
    results = entry.run.results
    assert results["validation_accuracy_after"] >= 0.9
    assert (results["examples"], results["examples_held_out"]) == (16, 4)
    first, *_, last = [s.values for s in entry.events.steps() if "loss" in s.values]
    assert last["loss"] < first["loss"]
    assert last["validation_loss"] < 0.69
    described = json.loads(world.resources["resources/policy.judge"][-1])
    assert described["purpose"] == "reward_model"


async def test_a_run_that_is_killed_ends_with_the_weights_of_one_that_is_not(world, sft_draft, carry_out):
    draft = pairs_draft(sft_draft, world, checkpoint_every=1)
    whole = await carry_out(draft)
    again = replace(draft, name="projects/default/trainingRuns/killed")
    killed = await carry_out(again, killed=kills(random.Random(3), calls=4, lives=3))
    assert killed.run.results["loss"] == pytest.approx(whole.run.results["loss"], rel=1e-6)
