"""What supervised fine-tuning learns from: demonstrations, and what went well in another run."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms import sft
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.rollouts.trajectory import Conversation
from fulmen_algorithm.runs.creation import CreationRules, RunDraft, checked_run
from fulmen_algorithm.runs.registry import Entry
from fulmen_algorithm.runs.run import RunState, TrainingRun
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.sft import sft_row
from tests.support.algorithm.model_services import ModelResources, World
from tests.support.algorithm.run_service import ALGORITHMS, Service, created, live, now

OTHER = "trainingRuns/other"


def group(group_id: str, rewards: list[float | None]) -> FinishedGroup:
    """Makes a group of another run."""
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


async def ended(open_service: Callable[[World], Service], world: World, run: TrainingRun) -> Entry:
    """Runs a run to its end."""
    service = open_service(world)
    service.runs.add(run)
    assert await live(service, run, world.crashes)
    return service.runs.entry(run.name)


@pytest.fixture
def draft(sft_draft: RunDraft, world: World) -> RunDraft:
    """Returns a run that learns from another one."""
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


async def test_the_successes_of_another_run_are_learned_from(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    entry = await ended(open_service, world, await created(draft, world))
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    # Two of the first task, three of the third, none of the second, and nothing of a validation.
    assert entry.run.results["examples"] == 5
    assert entry.run.policy_version == "resources/policy.tiny/versions/1"
    assert any(f"5 rollouts of {OTHER} give 5 rows." in notice.message for notice in entry.events.notices())


async def test_what_another_tokenizer_has_made_is_tokenised_again(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.answer_text = "not what these tokens say"
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    world.conversations = ((messages, ()),)
    entry = await ended(open_service, world, await created(draft, world))
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    # The same conversation counts once for a task.
    assert entry.run.results["examples"] == 2
    assert any("5 of them were tokenised again" in notice.message for notice in entry.events.notices())


async def test_the_branches_of_a_run_that_was_put_back_are_learned_from_too(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    later = [
        group("branch-1/train/0", [1.0]),
        group("branch-12/train/7", [1.0]),
        group("branch-1/validation/1/0", [1.0]),
    ]
    world.others[OTHER] += later
    for each in later:
        world.sampled_with |= {rollout.attempt: 1 for rollout in each.rollouts}
    entry = await ended(open_service, world, await created(draft, world))
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert entry.run.results["examples"] == 5 + 2


async def test_only_what_is_learned_from_is_read(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    read: list[str] = []
    world.read = read.extend
    entry = await ended(open_service, world, await created(draft, world))
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    expected = ("train/0.0", "train/0.2", "train/2.0", "train/2.1", "train/2.2")
    assert sorted(read) == [f"projects/default/rollouts/{name}/attempts/1" for name in expected]


async def test_a_conversation_that_is_too_long_when_tokenised_again_is_left_out(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    world.answer_text = "not what these tokens say"

    def told(question: str) -> Conversation:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": "2"}], ()

    world.conversations = (told("1+1="), told("1+" * 30 + "1="))
    settings = {**json.loads(draft.settings_json), "token_budget": 32}
    entry = await ended(open_service, world, await created(replace(draft, settings_json=json.dumps(settings)), world))
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert entry.run.results["examples"] == 2


async def test_texts_are_tokenised_beside_the_event_loop(
    world: World, draft: RunDraft, open_service: Callable[[World], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Row:
        threads.append(threading.get_ident())
        return sft_row(*args, **kwargs)

    monkeypatch.setattr(sft, "sft_row", noted)
    world.answer_text = "not what these tokens say"
    world.conversations = (([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], ()),)
    inputs = {**draft.inputs, "demonstrations": "resources/dataset.demonstrations/versions/1"}
    inputs["validation_demonstrations"] = inputs["demonstrations"]
    entry = await ended(open_service, world, await created(replace(draft, inputs=inputs), world))
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert len(threads) == 1 + 1 + 5
    assert threading.get_ident() not in threads


async def test_the_rollouts_of_a_run_that_does_not_exist_are_a_problem_before_it_begins(
    world: World, draft: RunDraft
) -> None:
    unknown = replace(draft, inputs={"rollouts": "trainingRuns/nobody-1"})
    with pytest.raises(SettingsInvalid) as raised:
        await created(unknown, world)
    (violation,) = raised.value.violations
    assert violation.field == "inputs.rollouts"
    assert violation.description.startswith("there is no training run trainingRuns/nobody-1 in projects/default")
    resources = ModelResources(world)
    assert await checked_run(
        unknown, rules=CreationRules(registry=ALGORITHMS), resources=resources, now=now(), knows_run=lambda *run: True
    )


async def test_epochs_become_steps_when_the_data_are_read(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    settings = {
        "epochs": 2.5,
        "batch_size": 2,
        "max_per_task": 3,
        "report_every": 2,
        "schedule": "linear",
        "learning_rate": 0.01,
    }
    run = await created(replace(draft, settings_json=json.dumps(settings)), world)
    assert run.step_count == 0
    entry = await ended(open_service, world, run)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    assert entry.run.results["examples"] == 5
    # Two and a half times five rows, two in each step.
    assert (entry.run.step, entry.run.step_count) == (7, 7)
    steps = {each.step: each.values for each in entry.events.steps()}
    assert {step: values["epoch"] for step, values in steps.items()} == pytest.approx({2: 0.8, 4: 1.6, 6: 2.4, 7: 2.8})
    assert [steps[n]["learning_rate"] for n in (2, 7)] == pytest.approx([0.01 * 6 / 7, 0.01 / 7])
    assert steps[7]["eta_seconds"] == 0


async def test_a_warm_up_that_the_epochs_do_not_have_is_told(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    settings = json.dumps({"epochs": 1, "batch_size": 5, "warmup_steps": 2, "max_per_task": 3})
    entry = await ended(open_service, world, await created(replace(draft, settings_json=settings), world))
    assert entry.run.failure_message == "warmup_steps is 2, but the run has 1 steps: 5 rows."


async def test_a_run_without_successes_cannot_be_learned_from(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    settings = json.dumps({"steps": 3, "min_reward": 2.0})
    entry = await ended(open_service, world, await created(replace(draft, settings_json=settings), world))
    assert "No rollout of trainingRuns/other can be learned from" in entry.run.failure_message


async def test_the_loss_of_what_is_held_out_is_told_and_falls(
    world: World, sft_draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    held_out = sft_draft.inputs["demonstrations"]
    settings = json.dumps({"steps": 8, "batch_size": 1, "report_every": 4, "learning_rate": 0.01, "warmup_steps": 0})
    draft = replace(
        sft_draft, settings_json=settings, inputs={**sft_draft.inputs, "validation_demonstrations": held_out}
    )
    entry = await ended(open_service, world, await created(draft, world))
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    results = entry.run.results
    assert results["validation_loss"] < results["validation_loss_before"]
    assert [s.step for s in entry.events.steps() if "validation_loss" in s.values] == [0, 4, 8]
    assert entry.events.steps()[-1].values["epoch"] == 8.0
