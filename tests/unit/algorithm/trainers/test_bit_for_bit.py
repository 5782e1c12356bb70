"""A run that was interrupted ends with the very weights of one that was not, where the order of rollouts is fixed."""

import json
from dataclasses import replace
from hashlib import file_digest, sha256
from pathlib import Path

import pytest

from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import WAIT_S, Service, created, live, made_world, service_at, until, working

KILLED_AT = (3, 7, 6, 4, 5)


def fixed_world() -> World:
    """Makes a world that finishes groups in the order in which they were submitted, with rewards of their own.

    The first rollout of each group, the only one of a validation task, has always the same: the last version is the best
    and is served at the end.
    """
    world = made_world()
    world.in_order = True
    world.reward_of = lambda name: 0.5 if name.endswith(".0") else sha256(name.encode()).digest()[0] / 255
    return world


def fixed_draft(draft: RunDraft) -> RunDraft:
    """Returns a run in which every number is decided by the settings."""
    settings = json.loads(draft.settings_json) | {"max_staleness": 0, "steps": 5, "minibatches": 2}
    settings |= {"schedule": "cosine", "warmup_steps": 1, "checkpoint_every": 2}
    return replace(draft, settings_json=json.dumps(settings))


def digest(service: Service, draft: RunDraft) -> str:
    run = service.runs.entry(draft.name).run
    assert run.state is RunState.SUCCEEDED, run.failure_message
    assert service.runs.entry(draft.name).files.notes()["best"]["step"] == run.step, "an older version is served"
    with (Path(run.model_path) / "model.safetensors").open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


async def uninterrupted(draft: RunDraft, folder: Path) -> str:
    world = fixed_world()
    service = service_at(folder, world)
    service.runs.add(await created(draft, world))
    assert await live(service, service.runs.entry(draft.name).run, world.crashes)
    return digest(service, draft)


async def test_weights_are_the_same_bit_for_bit_however_often_the_process_was_killed(grpo_draft, tmp_path):
    draft, world = fixed_draft(grpo_draft), fixed_world()
    service = service_at(tmp_path / "killed", world)
    run = await created(draft, world)
    service.runs.add(run)
    for at_call in KILLED_AT:
        world.new_life(Crashes(at_call=at_call, after_effect=at_call % 2 == 0))
        assert not await live(service, run, world.crashes)
        service = service_at(tmp_path / "killed", world)
    world.new_life(Crashes())
    assert await live(service, run, world.crashes)
    assert digest(service, draft) == await uninterrupted(draft, tmp_path / "whole")


@pytest.mark.long(short=True)
async def test_weights_are_the_same_bit_for_bit_after_a_pause(grpo_draft, tmp_path, open_service):
    draft, world = fixed_draft(grpo_draft), fixed_world()
    run = await created(draft, world)
    async with working(open_service(world)) as service:
        world.crashes = Crashes(at_call=20, act=lambda: service.runs.pause(run.name))
        service.runs.add(run)
        await until(service, run.name, RunState.PAUSED)
        service.runs.resume(run.name)
        await service.runs.wait_final(run.name, timeout_s=WAIT_S)
        paused = digest(service, draft)
    assert paused == await uninterrupted(draft, tmp_path / "whole")
    different = replace(draft, settings_json=json.dumps(json.loads(draft.settings_json) | {"learning_rate": 4e-4}))
    assert paused != await uninterrupted(different, tmp_path / "different")
