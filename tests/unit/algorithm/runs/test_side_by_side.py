"""Several runs at a time: as many as are allowed, fair to projects, and never two that train the same policy."""

import asyncio
from dataclasses import replace
from datetime import timedelta

from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.control import RunControl
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.registry import ActiveRun, RunRegistry
from fulmen_algorithm.runs.run import RunState, TrainingRun
from tests.support.algorithm.model_services import Crashes
from tests.support.algorithm.new_run import now
from tests.support.algorithm.run_service import WAIT_S, Service, created, until


def named(draft: RunDraft, name: str, policy: str) -> RunDraft:
    return replace(draft, name=f"projects/default/trainingRuns/{name}", policy=replace(draft.policy, name=policy))


def notices(service: Service, run: TrainingRun) -> list[str]:
    """Returns what a run told people."""
    return [notice.message for notice in service.runs.entry(run.name).events.notices()]


async def test_a_run_ends_while_another_one_stands_still(world, grpo_draft, service):
    stuck = await created(named(grpo_draft, "stuck", "one"), world)
    lively = await created(named(grpo_draft, "lively", "two"), world)
    late = await created(named(grpo_draft, "late", "three"), world)
    world.child("stuck").crashes = Crashes(at_call=9)
    world.child("lively")
    world.child("late")
    service.runs.add(stuck)
    await world.child("stuck").crashes.killed.wait()
    service.runs.add(lively)
    service.runs.add(late)
    assert (await service.finish(lively)).state is RunState.SUCCEEDED
    assert (await service.finish(late)).state is RunState.SUCCEEDED
    assert service.runs.entry(stuck.name).run.state is RunState.RUNNING
    began = [service.runs.entry(run.name).run.start_time for run in (stuck, lively, late)]
    assert began == sorted(began)
    assert not any("same policy" in text for text in notices(service, late))


async def test_a_run_waits_for_another_that_trains_the_same_policy_and_says_so(world, grpo_draft, service):
    first = await created(named(grpo_draft, "first", "shared"), world)
    second = await created(named(grpo_draft, "second", "shared"), world)
    world.child("first").crashes = Crashes(at_call=9)
    world.child("second")
    service.runs.add(first)
    await world.child("first").crashes.killed.wait()
    service.runs.add(second)
    async with asyncio.timeout(WAIT_S):
        async for event in service.runs.entry(second.name).events.follow(0):
            if event.notice is not None:
                break
    (said,) = notices(service, second)
    assert said.startswith(f"Waits for {first.name}, which trains the same policy 'shared'; `fulmen run stop first`")
    assert service.runs.entry(second.name).run.state is RunState.PENDING
    await service.worker.cancel(first.name)
    await until(service, second.name, RunState.RUNNING)
    done = await service.finish(second)
    assert done.state is RunState.SUCCEEDED


def active(run: TrainingRun) -> ActiveRun:
    """Makes the turn of a run in which nothing happens."""
    task = asyncio.create_task(asyncio.sleep(0))
    return ActiveRun(name=run.name, project=run.project, policy=run.policy.name, control=RunControl(), task=task)


async def test_turns_go_to_the_project_with_the_fewest_active_runs_and_there_to_the_oldest(world, sft_draft, tmp_path):
    runs = RunRegistry(RunStorage(tmp_path), clock=now, max_concurrent=3)
    started = now()
    for number, project in enumerate(["busy", "busy", "busy", "quiet", "busy"]):
        run = await created(named(sft_draft, f"r{number}", f"p{number}"), world)
        age = timedelta(seconds=number)
        runs.add(replace(run, name=run.name.replace("default", project), create_time=started + age))
    order = []
    while len(order) < 3:
        run = await runs.next_runnable()
        runs.begin(active(run))
        order.append(run.run_id)
    assert order == ["r0", "r3", "r1"]
    waiting = asyncio.create_task(runs.next_runnable())
    await asyncio.sleep(0)
    assert not waiting.done(), "more runs than are allowed had a turn"
    waits = runs.entry("projects/busy/trainingRuns/r2").events.notices()
    assert [each.message.partition(":")[0] for each in waits] == ["Waiting for a run slot"]
    runs.move("projects/busy/trainingRuns/r0", RunState.RUNNING)
    runs.move("projects/busy/trainingRuns/r0", RunState.SUCCEEDED)
    runs.end("projects/busy/trainingRuns/r0")
    assert (await waiting).run_id == "r2"


async def test_a_run_that_was_running_when_the_service_stopped_goes_first(world, sft_draft, tmp_path):
    runs = RunRegistry(RunStorage(tmp_path), clock=now)
    for number in range(3):
        runs.add(await created(named(sft_draft, f"r{number}", f"p{number}"), world))
    runs.move("projects/default/trainingRuns/r2", RunState.RUNNING)
    assert (await runs.next_runnable()).run_id == "r2"


async def test_a_run_that_waits_for_one_of_another_project_is_not_told_its_name(world, sft_draft, tmp_path):
    runs = RunRegistry(RunStorage(tmp_path), clock=now, max_concurrent=2)
    mine = await created(named(sft_draft, "mine", "shared"), world)
    theirs = replace(mine, name="projects/other/trainingRuns/theirs")
    for run in (theirs, mine):
        runs.add(run)
    runs.begin(active(theirs))
    waiting = asyncio.create_task(runs.next_runnable())
    await asyncio.sleep(0)
    (told,) = runs.entry(mine.name).events.notices()
    assert told.message == "Waits for a run of another project, whose policy has the same name 'shared'."
    waiting.cancel()
