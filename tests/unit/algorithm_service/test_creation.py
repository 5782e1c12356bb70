"""A run that cannot work is refused before it exists, with everything that is wrong with it."""

import json
from dataclasses import replace

import pytest

from fulmen.errors import ResourceNotFound, SettingsInvalid
from fulmen_algorithm.domain.creation import RunDraft
from fulmen_algorithm.domain.run import PolicyOrigin, PolicySpec
from tests.unit.algorithm_service.conftest import created
from tests.unit.algorithm_service.model_world import World


async def problems(draft: RunDraft, world: World) -> dict[str, str]:
    """Returns what is wrong with a draft, by field."""
    with pytest.raises(SettingsInvalid) as raised:
        await created(draft, world)
    return {v.field: v.description for v in raised.value.violations}


async def test_every_problem_is_reported_at_once(world: World, grpo_draft: RunDraft) -> None:
    bad_tasks = world.add_resource("resources/dataset.bad", b'{"a": 1}\n{oops\n\n[1, 2\n')
    draft = replace(
        grpo_draft,
        name="trainingRuns/Not OK",
        settings_json=json.dumps({"steps": 0, "group_size": "8", "stesp": 3}),
        policy=PolicySpec(name="No!", origin=PolicyOrigin.BUILD, source="make_model"),
        inputs={"train_tasks": bad_tasks, "tasks": "resources/x", "validation_tasks": "latest"},
    )
    found = await problems(draft, world)
    assert set(found) == {
        "name",
        "settings.steps",
        "settings.group_size",
        "settings.stesp",
        "policy.name",
        "policy.build",
        "inputs.bundle",
        "inputs.agent",
        "inputs.tasks",
        "inputs.validation_tasks",
        "inputs.train_tasks:2",
        "inputs.train_tasks:4",
    }
    assert found["settings.stesp"] == "no such setting"


async def test_an_unknown_algorithm_names_the_known_ones(world: World, grpo_draft: RunDraft) -> None:
    found = await problems(replace(grpo_draft, algorithm="grop"), world)
    assert found == {"algorithm": "'grop' is not one of: grpo, replay, sft"}


async def test_settings_that_are_no_object_are_one_problem(world: World, grpo_draft: RunDraft) -> None:
    assert set(await problems(replace(grpo_draft, settings_json="{"), world)) == {"settings"}


async def test_demonstrations_are_checked_line_by_line(world: World, sft_draft: RunDraft) -> None:
    lines = [{"messages": [{"role": "user", "content": "x"}]}, {"messages": [{"role": "robot"}]}, {"text": "x"}]
    name = world.add_resource("resources/dataset.odd", b"\n".join(json.dumps(line).encode() for line in lines))
    found = await problems(replace(sft_draft, inputs={"demonstrations": name}), world)
    assert list(found) == [f"inputs.demonstrations:{n}" for n in (1, 2, 3)]


async def test_an_unknown_input_is_not_found(world: World, grpo_draft: RunDraft) -> None:
    inputs = {**grpo_draft.inputs, "agent": "resources/agent.solver/versions/7"}
    with pytest.raises(ResourceNotFound):
        await created(replace(grpo_draft, inputs=inputs), world)


async def test_the_newest_version_must_exist(world: World, grpo_draft: RunDraft) -> None:
    found = await problems(replace(grpo_draft, policy=PolicySpec(name="tiny")), world)
    assert list(found) == ["policy"]


async def test_defaults_are_filled_in(world: World, sft_draft: RunDraft) -> None:
    run = await created(replace(sft_draft, name="", settings_json=""), world)
    settings = json.loads(run.settings_json)
    assert settings["steps"] == run.step_count == 200
    assert settings["learning_rate"] == 1e-3
    assert run.name.startswith("trainingRuns/")
