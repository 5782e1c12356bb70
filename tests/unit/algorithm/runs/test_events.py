"""A run's events: numbered without gaps, kept over restarts, resumable, closed by the final state."""

import asyncio
import json
import math
from dataclasses import replace

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.entry import EventLog
from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.run import RunState, moved
from fulmen_algorithm.transport import encode
from tests.support.algorithm.new_run import now
from tests.support.algorithm.run_service import created, follow


async def test_a_watcher_gets_what_came_before_and_what_comes_until_the_final_state(world, sft_draft, tmp_path):
    run = await created(sft_draft, world)
    log = EventLog(RunFiles(tmp_path), now)
    log.state_changed(run)
    log.notify("info", "hello")
    early, late = asyncio.create_task(follow(log, 0)), asyncio.create_task(follow(log, 1))
    await asyncio.sleep(0)
    log.step_done(StepMetrics(step=1, values={"loss": 1.0}))
    log.state_changed(replace(run, state=RunState.SUCCEEDED))
    assert [e.sequence for e in await early] == [1, 2, 3, 4]
    assert [e.sequence for e in await late] == [2, 3, 4]
    assert [e.sequence for e in await follow(log, 4)] == []


async def test_a_message_about_a_run_that_has_ended_leaves_no_watcher_waiting(world, sft_draft, tmp_path):
    log = EventLog(RunFiles(tmp_path), now)
    log.state_changed(replace(await created(sft_draft, world), state=RunState.CANCELLED))
    log.notify("warning", "rollouts may be left")
    for watched in (log, EventLog(RunFiles(tmp_path), now)):
        assert [e.sequence for e in await follow(watched, 0)] == [1, 2]


async def test_numbering_continues_after_a_restart_and_a_torn_line_is_removed(tmp_path):
    log = EventLog(RunFiles(tmp_path), now)
    log.notify("info", "one")
    log.notify("info", "two")
    with (tmp_path / "journal-00000000/events.jsonl").open("ab") as file:
        file.write(b'{"sequence": 3, "no')
    again = EventLog(RunFiles(tmp_path), now)
    again.notify("warning", "three")
    events = RunFiles(tmp_path).read()
    assert [e.sequence for e in events] == [1, 2, 3]
    assert [e.notice.message for e in events if e.notice] == ["one", "two", "three"]


async def test_half_of_a_surrogate_pair_in_a_message_keeps_nobody_from_reading_the_run(world, sft_draft, tmp_path):
    # As texts from JSON may hold it, such as the end of a model's answer that was cut.
    half = json.loads('"an answer \\ud83d"')
    run = await created(sft_draft, world)
    failed = moved(replace(run, state=RunState.RUNNING), RunState.FAILED, now=now(), failure_message=half)
    files = RunFiles(tmp_path)
    log = EventLog(files, now)
    log.notify("warning", half)
    log.state_changed(failed)
    files.save_run(failed)
    read = RunFiles(tmp_path)
    assert read.load_run() == failed
    told = [encode.event(each) for each in EventLog(read, now).piece(0, 2)]
    assert [told[0].notice.message, told[1].run.failure_message] == ["an answer ?", "an answer ?"]


async def test_metrics_that_are_not_finite_are_read_as_they_were_written(world, sft_draft, tmp_path):
    # Such as the loss of a step that was skipped over it.
    odd = {"loss": math.nan, "grad_norm": math.inf}
    files = RunFiles(tmp_path)
    files.save_run(replace(await created(sft_draft, world), results=odd))
    EventLog(files, now).step_done(StepMetrics(step=1, values=odd))
    run, log = files.load_run(), EventLog(files, now)
    assert run is not None
    for metrics in (run.results, log.latest_metrics):
        assert math.isnan(metrics["loss"])
        assert metrics["grad_norm"] == math.inf


async def test_the_last_metrics_of_a_repeated_step_count(tmp_path):
    log = EventLog(RunFiles(tmp_path), now)
    log.step_done(StepMetrics(step=1, values={"loss": 1.0, "reward_mean": 0.5}))
    log.step_done(StepMetrics(step=2, values={"loss": 0.9}))
    log.step_done(StepMetrics(step=1, values={"loss": 0.8}))
    assert [(s.step, s.values["loss"]) for s in log.steps()] == [(1, 0.8), (2, 0.9)]
