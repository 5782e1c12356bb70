"""An evaluation counts every rollout once, serves the requested version, and reports intervals."""

import json
import random
from dataclasses import replace

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms.evaluate import EvaluateSettings, Tally
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout, Mode
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.report import report
from fulmen_algorithm.runs.run import NO_POLICY, PolicyOrigin, PolicySpec
from tests.support.algorithm.run_service import created, kills, notices, run_journal

SETTINGS = {"samples": 4, "pass_at": [1, 2, 4], "temperature": 0}
TASKS = 7


@pytest.fixture
def draft(grpo_draft: RunDraft) -> RunDraft:
    inputs = {"agent": grpo_draft.inputs["agent"], "test_tasks": grpo_draft.inputs["train_tasks"]}
    return replace(
        grpo_draft, algorithm="evaluate", settings_json=json.dumps(SETTINGS), policy=NO_POLICY, inputs=inputs
    )


@pytest.mark.parametrize("trial", range(4))
async def test_every_rollout_counts_once_wherever_the_process_is_killed(trial, world, draft, carry_out):
    world.chance, world.failure_rate = random.Random(trial), 0.2
    entry = await carry_out(draft, killed=kills(random.Random(trial), calls=3) if trial else ())
    assert [spec.mode for spec in world.groups.values()] == [Mode.TEST] * TASKS
    rollouts = [each for group in world.feed for each in group.rollouts]
    passed = [sum(each.reward == 1.0 for each in group.rollouts) / 4 for group in world.feed]
    results = entry.run.results
    assert results["test_rollouts"] == len(rollouts) == TASKS * 4
    assert results["test_rollouts_failed"] == sum(not each.succeeded for each in rollouts) > 0
    assert results["test_rollouts_lost"] == 0
    assert results["test_pass_at_1"] == pytest.approx(sum(passed) / TASKS)
    assert results["test_pass_at_4"] == pytest.approx(sum(share > 0 for share in passed) / TASKS)
    assert results["test_pass_at_1_low"] < results["test_pass_at_1"] < results["test_pass_at_1_high"]
    assert results["test_pass_at_1"] < results["test_pass_at_2"] < results["test_pass_at_4"]


async def test_a_version_is_served_and_not_trained(world, draft, carry_out, tiny_model, tmp_path):
    world.add_resource("resources/policy.tiny", json.dumps({"path": str(tiny_model)}).encode())
    named = replace(draft, policy=PolicySpec(name="tiny", origin=PolicyOrigin.NEWEST))
    entry = await carry_out(named)
    assert world.served_versions == [1]
    assert world.resources["resources/policy.tiny"] == [world.resources["resources/policy.tiny"][0]]
    shown = report(entry.run, entry.events.steps(), entry.events.notices(), {}, []).markdown
    assert "test_pass_at_1_low" in shown
    notes = json.loads((run_journal(tmp_path) / "notes.json").read_text())
    assert "## Evaluation on test tasks" in report(entry.run, [], [], notes, []).markdown


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"settings_json": '{"samples": 2, "pass_at": [4]}'}, "settings"),
        ({"settings_json": '{"learning_rate": 0.1}'}, "settings.learning_rate"),
        ({"settings_json": '{"steps": 3}'}, "settings.steps"),
        ({"policy": PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source="/tmp")}, "policy.path"),
        ({"inputs": {"agent": "resources/agent.solver/versions/1"}}, "inputs.validation_tasks"),
    ],
)
async def test_contradicting_settings_are_refused(world, draft, change, field):
    with pytest.raises(SettingsInvalid) as caught:
        await created(replace(draft, **change), world)
    assert [each.field for each in caught.value.violations] == [field]


async def test_an_agent_that_fails_everything_is_measured_and_reported(world, draft, carry_out):
    world.failure_rate = 1.0
    entry = await carry_out(draft)
    assert entry.run.results["test_pass_at_1"] == 0
    [told] = [text for text in notices(entry) if "succeeded" in text]
    assert told.startswith(f"No rollout on the test tasks succeeded (AGENT_ERROR: {TASKS * 4}).")
    assert "See why: `fulmen rollout show projects/default/rollouts/" in told


def test_the_length_of_answers_is_the_agents_unless_it_is_said():
    free, bound = EvaluateSettings(), EvaluateSettings(max_tokens=7)
    assert all(fields.keys() == {"temperature"} for fields in free.overrides.values())
    assert all(fields["max_tokens"] == 7 for fields in bound.overrides.values())


def test_a_rollout_that_was_lost_says_nothing_about_the_agent():
    kinds = [("", 1.0), ("AGENT_ERROR", None), ("INFRA", None), ("LEASE_LOST", None)]
    rollouts = tuple(
        FinishedRollout(name=kind, attempt="", succeeded=not kind, reward=reward, failure=kind)
        for kind, reward in kinds
    )
    group = FinishedGroup(group_id="evaluation/test/0", rollouts=rollouts, cursor="")
    for failure_reward, mean in ((0.0, 0.5), (-2.0, -0.5)):
        tally = Tally()
        tally.add(group, success_reward=1.0, failure_reward=failure_reward)
        assert (tally.passed, tally.rewards, tally.lost) == ([(1, 2)], [mean], 2)
