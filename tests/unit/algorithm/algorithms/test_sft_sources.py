"""Supervised fine-tuning learns from demonstrations and from the successes of another run."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms import sft
from fulmen_algorithm.algorithms.offline import stored_rows
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.rollouts.trajectory import Conversation
from fulmen_algorithm.runs.creation.rules import CreationRules, RunDraft
from fulmen_algorithm.runs.creation.stages import checked_runs
from fulmen_algorithm.runs.run import RunState
from fulmen_algorithm.training.rows import Row, sft_row
from tests.support.algorithm.model_services import ModelResources, World
from tests.support.algorithm.new_run import now
from tests.support.algorithm.run_service import ALGORITHMS, created, notices, with_settings

OTHER = "projects/default/trainingRuns/other"


def group(group_id: str, rewards: list[float | None]) -> FinishedGroup:
    rollouts = tuple(
        FinishedRollout(
            name=f"projects/default/rollouts/{group_id}.{n}",
            attempt=f"projects/default/rollouts/{group_id}.{n}/attempts/1",
            succeeded=reward is not None,
            reward=reward,
        )
        for n, reward in enumerate(rewards)
    )
    return FinishedGroup(group_id=group_id, rollouts=rollouts, cursor="")


@pytest.fixture
def draft(sft_draft: RunDraft, world: World) -> RunDraft:
    world.others[OTHER] = [
        group("train/0", [1.0, 0.0, 1.0, None]),
        group("train/1", [0.5, 0.9]),
        group("train/2", [1.0, 1.0, 1.0, 1.0]),
        group("validation/1/0", [1.0]),
    ]
    for each in world.others[OTHER]:
        world.sampled_with |= {rollout.attempt: 1 for rollout in each.rollouts}
    settings = {"steps": 3, "batch_size": 2, "report_every": 1, "max_per_task": 3}
    return replace(sft_draft, inputs={"rollouts": OTHER}, settings_json=json.dumps(settings))


async def test_the_successes_of_another_run_are_learned_from(world, draft, carry_out):
    entry = await carry_out(draft)
    # Two of the first task, three of the third, none of the second, and nothing of a validation.
    assert entry.run.results["examples"] == 5
    assert entry.run.policy_version == "resources/policy.tiny/versions/1"
    assert any(f"5 rollouts of {OTHER} give 5 rows." in text for text in notices(entry))


async def test_what_another_tokenizer_has_made_is_tokenised_again(world, draft, carry_out):
    world.answer_text = "not what these tokens say"
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    world.conversations = ((messages, ()),)
    entry = await carry_out(draft)
    # The same conversation counts once for a task.
    assert entry.run.results["examples"] == 2
    assert any("5 of them were tokenised again" in text for text in notices(entry))


async def test_the_branches_of_a_rolled_back_run_are_learned_from_too(world, draft, carry_out):
    later = [
        group("branch-1/train/0", [1.0]),
        group("branch-12/train/7", [1.0]),
        group("branch-1/validation/1/0", [1.0]),
    ]
    world.others[OTHER] += later
    for each in later:
        world.sampled_with |= {rollout.attempt: 1 for rollout in each.rollouts}
    entry = await carry_out(draft)
    assert entry.run.results["examples"] == 5 + 2


async def test_only_what_is_learned_from_is_read(world, draft, carry_out):
    read: list[str] = []
    world.read = read.extend
    await carry_out(draft)
    expected = ("train/0.0", "train/0.2", "train/2.0", "train/2.1", "train/2.2")
    assert sorted(read) == [f"projects/default/rollouts/{name}/attempts/1" for name in expected]


async def test_a_conversation_that_is_too_long_when_tokenised_again_is_left_out(world, draft, carry_out):
    world.answer_text = "not what these tokens say"

    def told(question: str) -> Conversation:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": "2"}], ()

    world.conversations = (told("1+1="), told("1+" * 30 + "1="))
    entry = await carry_out(with_settings(draft, token_budget=32))
    assert entry.run.results["examples"] == 2
    assert any("5 rows are left out because they are longer than token_budget = 32." in text for text in notices(entry))


async def test_answers_that_were_cut_off_are_no_examples_and_are_counted(world, draft, carry_out):
    world.truncates = lambda name: name.endswith(("/train/0.0", "/train/2.1"))
    entry = await carry_out(draft)
    assert entry.run.results["examples"] == 3
    told = "2 rollouts are left out because an answer was cut off at its token limit."
    assert any(told in text for text in notices(entry))


async def test_texts_are_tokenised_beside_the_event_loop(world, draft, carry_out, monkeypatch):
    threads: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Row:
        threads.append(threading.get_ident())
        return sft_row(*args, **kwargs)

    for module in (sft, stored_rows):
        monkeypatch.setattr(module, "sft_row", noted)
    world.answer_text = "not what these tokens say"
    world.conversations = (([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], ()),)
    inputs = {**draft.inputs, "demonstrations": "resources/dataset.demonstrations/versions/1"}
    inputs["validation_demonstrations"] = inputs["demonstrations"]
    await carry_out(replace(draft, inputs=inputs))
    assert len(threads) == 1 + 1 + 5
    assert threading.get_ident() not in threads


async def test_the_rollouts_of_a_run_that_does_not_exist_are_a_problem_before_it_begins(world, draft):
    unknown = replace(draft, inputs={"rollouts": "projects/default/trainingRuns/nobody-1"})
    with pytest.raises(SettingsInvalid) as raised:
        await created(unknown, world)
    (violation,) = raised.value.violations
    assert violation.field == "inputs.rollouts"
    assert violation.description.startswith(
        "there is no training run projects/default/trainingRuns/nobody-1 in projects/default"
    )
    resources = ModelResources(world)
    assert await checked_runs(
        [unknown], rules=CreationRules(registry=ALGORITHMS), resources=resources, now=now(), knows_run=lambda *run: True
    )


async def test_epochs_become_steps_when_the_data_are_read(world, draft, carry_out):
    draft = with_settings(draft, steps=None, epochs=2.5, report_every=2, schedule="linear", learning_rate=0.01)
    assert (await created(draft, world)).step_count == 0
    entry = await carry_out(draft)
    assert entry.run.results["examples"] == 5
    # Two and a half times five rows, two in each step.
    assert (entry.run.step, entry.run.step_count) == (7, 7)
    steps = {each.step: each.values for each in entry.events.steps()}
    assert {step: values["epoch"] for step, values in steps.items()} == pytest.approx({2: 0.8, 4: 1.6, 6: 2.4, 7: 2.8})
    assert [steps[n]["learning_rate"] for n in (2, 7)] == pytest.approx([0.01 * 6 / 7, 0.01 / 7])
    assert steps[7]["eta_seconds"] == 0


async def test_a_warm_up_longer_than_the_epochs_fails_the_run(world, draft, carry_out):
    draft = with_settings(draft, steps=None, epochs=1, batch_size=5, warmup_steps=2)
    entry = await carry_out(draft, state=RunState.FAILED)
    assert entry.run.failure_message == "warmup_steps is 2, but the run has 1 steps: 5 rows."


async def test_a_run_without_successes_cannot_be_learned_from(world, draft, carry_out):
    entry = await carry_out(with_settings(draft, min_reward=2.0), state=RunState.FAILED)
    assert "No rollout of projects/default/trainingRuns/other can be trained on" in entry.run.failure_message


async def test_the_held_out_loss_is_reported_and_falls(world, sft_draft, carry_out):
    held_out = sft_draft.inputs["demonstrations"]
    draft = replace(sft_draft, inputs={**sft_draft.inputs, "validation_demonstrations": held_out})
    draft = with_settings(draft, steps=8, batch_size=1, report_every=4, learning_rate=0.01, warmup_steps=0)
    entry = await carry_out(draft)
    results = entry.run.results
    assert results["validation_loss"] < results["validation_loss_before"]
    assert [s.step for s in entry.events.steps() if "validation_loss" in s.values] == [0, 4, 8]
    assert entry.events.steps()[-1].values["epoch"] == 8.0
