"""The forecast of a run is what a run like it measured, and never comes from another model or other settings."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from fulmen_algorithm.runs.creation.measured import MeasuredSteps, measured_steps
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec
from tests.support.algorithm.run_service import ALGORITHMS, Service, created, created_stages, with_settings

EARLIER = "projects/default/trainingRuns/earlier"
NOTHING = MeasuredSteps()


async def measured(service: Service, *drafts: RunDraft, device: str = "cpu") -> list[MeasuredSteps]:
    return await measured_steps(drafts, algorithms=ALGORITHMS, runs=service.runs, device=device)


@pytest.fixture
async def earlier(service: Service, world, sft_draft: RunDraft) -> RunDraft:
    """Returns the draft of a run that took 2 s a step, over a start of a minute."""
    draft = replace(with_settings(sft_draft, steps=40), name=EARLIER)
    await add(service, world, draft)
    return draft


async def add(service: Service, world, draft: RunDraft, *, seconds: float = 2.0, later_s: float = 0.0) -> None:
    run = await created(draft, world)
    # It has ended, and so no worker begins it.
    service.runs.add(replace(run, create_time=run.create_time + timedelta(seconds=later_s)))
    service.runs.pause(run.name)
    entry = service.runs.entry(run.name)
    for step, share in ((0, None), (10, 0.9), (20, 0.7)):
        spent = {"spent_start_seconds": 60.0, "spent_train_seconds": seconds * step * 0.75}
        spent["spent_validate_seconds"] = seconds * step * 0.25
        values = spent if share is None else {**spent, "packing_efficiency": share}
        entry.events.step_done(StepMetrics(step=step, values=values))
    entry.update(step=20, provenance={"device": "cpu"})


async def test_the_time_of_a_step_is_what_was_spent_without_the_start(service, earlier):
    [found] = await measured(service, replace(earlier, name=""))
    assert (found.training_run, found.steps) == (EARLIER, 20)
    assert found.step_seconds == pytest.approx(2.0)
    assert found.packing_efficiency == pytest.approx(0.8)


async def test_steps_seed_and_rate_may_differ(service, earlier):
    [found] = await measured(service, with_settings(earlier, steps=900, seed=7, learning_rate=1e-4, checkpoint_every=9))
    assert found.training_run == EARLIER


async def test_the_newest_run_counts(service, world, earlier):
    newer = "projects/default/trainingRuns/newer"
    await add(service, world, replace(earlier, name=newer), seconds=5.0, later_s=1.0)
    [found] = await measured(service, earlier)
    assert (found.training_run, found.step_seconds) == (newer, pytest.approx(5.0))


@pytest.mark.parametrize(
    "changed",
    [
        lambda draft: with_settings(draft, batch_size=4),
        lambda draft: with_settings(draft, precision="bf16"),
        lambda draft: replace(draft, policy=PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source="/another")),
        lambda draft: replace(draft, policy=PolicySpec(name="tiny")),
        lambda draft: replace(draft, algorithm="dpo"),
        lambda draft: replace(draft, project="projects/other"),
        lambda draft: replace(draft, settings_json='{"stesp": 3}'),
    ],
    ids=["batch", "precision", "model", "versions of a policy", "algorithm", "project", "not valid"],
)
async def test_a_run_that_differs_measured_something_else(service, earlier, changed):
    assert await measured(service, changed(earlier)) == [NOTHING]


async def test_another_kind_of_device_measured_something_else(service, earlier):
    assert await measured(service, earlier, device="cuda") == [NOTHING]


async def test_a_later_stage_is_compared_by_the_model_that_its_training_began_with(service, world, sft_draft):
    first = replace(sft_draft, name="projects/default/trainingRuns/one")
    second = replace(first, name="projects/default/trainingRuns/two", policy=PolicySpec(name="tiny"))
    for run in await created_stages([first, second], world):
        service.runs.add(run)
        service.runs.pause(run.name)
    entry = service.runs.entry(second.name)
    entry.events.step_done(StepMetrics(step=2, values={"spent_train_seconds": 3.0}))
    entry.update(step=2)
    other = replace(first, policy=PolicySpec(name="tiny", origin=PolicyOrigin.PATH, source="/another"))
    assert [each.training_run for each in await measured(service, first, second)] == [second.name, second.name]
    assert await measured(service, other, second) == [NOTHING, NOTHING]
