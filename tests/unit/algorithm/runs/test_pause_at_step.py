"""A run that pauses at a step and goes on trains as one that never stopped, and no step twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import RunState, TrainingRun
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import (
    WAIT_S,
    Service,
    created,
    made_world,
    service_at,
    until,
    with_settings,
    working,
)

LOSSES = ("loss", "learning_rate", "grad_norm")


async def ended(service: Service, draft, world, *rests: int) -> TrainingRun:
    """Carries a run out that rests at some steps."""
    run = await created(replace(draft, pause_at_step=rests[0] if rests else 0), world)
    service.runs.add(run)
    seen = 0
    for number, step in enumerate(rests):
        seen, rested = await next_rest(service, run, seen)
        assert rested.step == step
        service.runs.resume(run.name, pause_at_step=(*rests, 0)[number + 1])
    return await service.finish(run)


async def next_rest(service: Service, run: TrainingRun, after: int) -> tuple[int, TrainingRun]:
    """Waits until a run rests again; returns the event's number, and the run, whose slot is free."""
    async with asyncio.timeout(WAIT_S):
        async for event in service.runs.entry(run.name).events.follow(after):
            if event.run is not None and event.run.state is RunState.PAUSED:
                return event.sequence, event.run
    raise AssertionError("the run ended")


def steps_of(service: Service, run: TrainingRun) -> list[int]:
    """Returns the steps as they were reported, repetitions included."""
    events = service.runs.entry(run.name).events
    return [each.step for each in events.steps_between(0, events.last_sequence) if each.step]


def losses(service: Service, run: TrainingRun) -> list[list[float]]:
    steps = service.runs.entry(run.name).events.steps()
    return [[each.values[name] for name in LOSSES] for each in steps if each.step]


async def test_a_run_that_rests_trains_each_step_once_and_as_an_unbroken_one(service, world, sft_draft):
    draft = with_settings(sft_draft, steps=8, schedule="cosine", warmup_steps=2, checkpoint_every=100)
    names = [f"projects/default/trainingRuns/{name}" for name in ("whole", "rests")]
    whole = await ended(service, replace(draft, name=names[0]), world)
    rests = await ended(service, replace(draft, name=names[1]), world, 2, 5)
    assert [each.state for each in (whole, rests)] == [RunState.SUCCEEDED] * 2
    assert steps_of(service, rests) == list(range(1, 9))
    assert losses(service, rests) == losses(service, whole)
    models = [(Path(each.model_path) / "model.safetensors").read_bytes() for each in (whole, rests)]
    assert models[0] == models[1]


async def test_a_run_reports_what_it_has_learned_when_it_rests(service, world, sft_draft):
    inputs = {**sft_draft.inputs, "validation_demonstrations": sft_draft.inputs["demonstrations"]}
    draft = replace(with_settings(sft_draft, steps=6, report_every=100), inputs=inputs, pause_at_step=3)
    run = await created(draft, world)
    service.runs.add(run)
    rested = await until(service, run.name, RunState.PAUSED)
    assert rested.step == 3
    assert rested.results["validation_loss"] != rested.results["validation_loss_before"]


async def test_a_run_with_rollouts_validates_at_its_rest_and_uses_each_group_once(service, world, grpo_draft):
    draft = with_settings(grpo_draft, steps=4, validate_every=100)
    run = await created(replace(draft, pause_at_step=2), world)
    service.runs.add(run)
    rested = await until(service, run.name, RunState.PAUSED)
    assert (rested.step, "validation_accuracy_after" in rested.results) == (2, True)
    service.runs.resume(run.name)
    done = await service.finish(run)
    assert (done.state, done.step, done.pause_at_step) == (RunState.SUCCEEDED, 4, 0)
    assert sorted(set(steps_of(service, run))) == [1, 2, 3, 4]


async def drained(folder: Path, world: World, draft: RunDraft, call: int) -> tuple[Service, TrainingRun, bool]:
    """Starts a run again whose service was drained at a call of its ports; also returns whether it came so far."""
    world.reward_of = lambda name: version_of(world.served.name) + float(name.endswith(".0"))
    world.crashes = Crashes(at_call=call)
    run = await created(draft, world)
    async with working(service_at(folder, world)) as service:
        service.runs.add(run)
        ended = [
            asyncio.create_task(until(service, run.name, state)) for state in (RunState.PAUSED, RunState.SUCCEEDED)
        ]
        came = asyncio.create_task(world.crashes.killed.wait())
        await asyncio.wait({*ended, came}, return_when=asyncio.FIRST_COMPLETED)
        was_drained = came.done()
        await service.worker.drain()
        for task in (*ended, came):
            task.cancel()
        await asyncio.gather(*ended, came, return_exceptions=True)
    world.crashes = Crashes()
    return service_at(folder, world), run, was_drained


def version_of(name: str) -> int:
    return int(name.rpartition("/")[2])


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rejection", marks=pytest.mark.long)])
async def test_a_run_that_is_drained_before_it_rests_rests_at_its_step_with_the_metric_of_it(
    tmp_path: Path, grpo_draft: RunDraft, algorithm: str
) -> None:
    unknown = {"max_staleness": None} if algorithm == "rejection" else {}
    draft = with_settings(grpo_draft, algorithm=algorithm, steps=4, validate_every=1, **unknown)
    draft = replace(draft, pause_at_step=2)
    was_drained, call = True, 0
    while was_drained:
        call += 1
        service, run, was_drained = await drained(tmp_path / str(call), made_world(), draft, call)
        async with working(service):
            rested = await until(service, run.name, RunState.PAUSED)
        # A rollout of a validation has the reward of the version that it measures, and one more.
        measured = {name: rested.results[name] - 1 for name in ("validation_accuracy", "validation_accuracy_after")}
        assert (call, rested.step) == (call, 2)
        assert set(measured.values()) == {version_of(rested.policy_version)}, (call, measured)
    assert call > 15


async def test_a_run_that_is_drained_at_its_end_ends_with_the_loss_of_its_last_step(
    tmp_path: Path, sft_draft: RunDraft
) -> None:
    inputs = {**sft_draft.inputs, "validation_demonstrations": sft_draft.inputs["demonstrations"]}
    draft = replace(with_settings(sft_draft, steps=3, report_every=100), inputs=inputs)
    found, was_drained, call = set(), True, 0
    while was_drained:
        call += 1
        service, run, was_drained = await drained(tmp_path / str(call), made_world(), draft, call)
        async with working(service):
            done = await service.finish(run)
        found.add((done.step, done.results.get("validation_loss"), done.policy_version))
    assert call > 1
    assert len(found) == 1, found


async def test_a_rest_at_or_after_the_last_step_is_none(service, world, sft_draft):
    done = await service_finished(service, world, with_settings(sft_draft, steps=4), 4)
    assert done.state is RunState.SUCCEEDED


async def service_finished(service: Service, world, draft, pause_at_step: int) -> TrainingRun:
    run = await created(replace(draft, pause_at_step=pause_at_step), world)
    service.runs.add(run)
    return await service.finish(run)


async def test_a_run_does_not_rest_at_a_step_that_it_has_done(service, world, sft_draft):
    run = await created(replace(with_settings(sft_draft, steps=6), pause_at_step=3), world)
    service.runs.add(run)
    await until(service, run.name, RunState.PAUSED)
    with pytest.raises(ArgumentInvalid) as refused:
        service.runs.resume(run.name, pause_at_step=3)
    assert refused.value.violations[0].field == "pause_at_step"
    assert json.loads(run.settings_json)["steps"] == 6
