"""A run that pauses at a step and goes on trains as one that never stopped, and no step twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen_algorithm.runs.run import RunState, TrainingRun
from tests.support.algorithm.run_service import WAIT_S, Service, created, until, with_settings

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
