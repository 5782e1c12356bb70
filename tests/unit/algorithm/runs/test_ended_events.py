"""The events of a run that has ended are kept on disk only, and read on request only."""

import asyncio
import json
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_algorithm.persistence import files
from fulmen_algorithm.persistence.files import append_json_lines, append_line, last_line, read_lines
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs import entry
from fulmen_algorithm.runs.entry import EventLog
from fulmen_algorithm.runs.events import Event, StepMetrics
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import RunState, rolled_back
from fulmen_algorithm.sinks.publisher import MetricPublisher
from fulmen_algorithm.sinks.sink import load_sink
from tests.support.algorithm.new_run import now, training_run
from tests.support.algorithm.run_service import follow

NAME = "projects/default/trainingRuns/small"
STEPS = 5


class CountedFiles(RunFiles):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.events_read = 0

    def read(self) -> list[Event]:
        found = super().read()
        self.events_read += len(found)
        return found

    def read_between(self, after: int, upto: int) -> Iterator[Event]:
        for event in super().read_between(after, upto):
            self.events_read += 1
            yield event


def lived(log: EventLog) -> None:
    log.state_changed(training_run())
    for step in range(1, STEPS + 1):
        log.step_done(StepMetrics(step=step, values={"loss": 1 / step}))
    log.notify("info", "done")
    log.state_changed(training_run(state=RunState.SUCCEEDED))


async def test_events_of_an_ended_run_are_the_same_from_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "READ_AT_ONCE", 2)
    file = CountedFiles(tmp_path)
    log = EventLog(file, now)
    early = asyncio.create_task(follow(log, 0))
    await asyncio.sleep(0)
    lived(log)
    assert file.events_read == 0
    assert log.latest_metrics == {"loss": 1 / STEPS}
    again = EventLog(file, now, ended=True)
    assert (again.last_sequence, file.events_read) == (STEPS + 3, 0), "the newest event says how many there are"
    written = file.read()
    assert await early == written
    for told in (log, again):
        assert await follow(told, 0) == written
        assert await follow(told, 4) == written[4:]
        assert await follow(told, 99) == []
        assert [s.step for s in told.steps()] == [*range(1, STEPS + 1)]
        assert [s.step for s in told.steps_between(2, 4)] == [2, 3]
        assert [n.message for n in told.notices()] == ["done"]


async def test_a_rolled_back_run_keeps_new_events_in_memory(tmp_path):
    lived(EventLog(RunFiles(tmp_path), now))
    file = CountedFiles(tmp_path)
    log = EventLog(file, now, ended=True)
    log.notify("warning", "rollouts may be left")
    assert len(await follow(log, 0)) == STEPS + 4, "nobody waits for a run that has ended"
    file.events_read = 0
    back = rolled_back(training_run(state=RunState.SUCCEEDED), sequence=1, step=2)
    log.state_changed(back)
    log.step_done(StepMetrics(step=3, values={"loss": 9.0}))
    assert log.latest_metrics == {"loss": 9.0}
    assert [s.values["loss"] for s in log.steps_between(STEPS + 4, log.last_sequence)] == [9.0]
    assert file.events_read == 0, "what is new is in memory"
    watched = asyncio.create_task(follow(log, STEPS))
    await asyncio.sleep(0)
    log.state_changed(replace(back, state=RunState.FAILED))
    assert [e.sequence for e in await watched] == [*range(STEPS + 1, STEPS + 8)]
    assert [(s.step, s.values["loss"]) for s in log.steps()] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    assert [e.sequence for e in file.read()] == [*range(1, STEPS + 8)]


async def test_sinks_that_have_all_metrics_of_ended_runs_read_nothing_at_a_start(tmp_path):
    sinks = {"tensorboard": load_sink("tensorboard")}
    first = RunRegistry(RunStorage(tmp_path), clock=now)
    first.add(training_run())
    carrying = MetricPublisher(first, sinks)
    first.move(NAME, RunState.RUNNING)
    first.entry(NAME).events.step_done(StepMetrics(step=1, values={"loss": 1.0}))
    first.move(NAME, RunState.SUCCEEDED)
    await carrying.carry()

    def started() -> tuple[MetricPublisher, CountedFiles]:
        file = CountedFiles(tmp_path / "runs/default/small")
        run = file.load_run()
        assert run is not None
        runs = RunRegistry(RunStorage(tmp_path), clock=now)
        runs.restore(run, file)
        return MetricPublisher(runs, sinks), file

    again, file = started()
    await again.carry()
    assert file.events_read == 0
    position = tmp_path / "runs/default/small/journal-00000000/metrics.json"
    position.write_text(json.dumps({"sequence": 2}))
    again, file = started()
    await again.carry()
    assert file.events_read == 2, "what was left is carried"
    assert json.loads(position.read_text()) == {"sequence": 4}


@settings(deadline=None)
@given(
    lines=st.lists(st.binary(min_size=1, max_size=20).map(lambda raw: raw.hex().encode()), max_size=6),
    torn=st.binary(max_size=20).map(lambda raw: raw.hex().encode()),
    block=st.integers(1, 50),
)
def test_the_last_line_is_the_last_that_is_whole(lines, torn, block):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK", block)
        path = Path(folder) / "lines"
        path.write_bytes(b"".join(line + b"\n" for line in lines) + torn)
        assert last_line(path) == (lines[-1] if lines else None)
        assert path.read_bytes() == b"".join(line + b"\n" for line in lines)


def test_who_reads_beside_the_writer_leaves_a_line_alone_that_is_being_written(tmp_path):
    path = tmp_path / "versions.jsonl"
    append_json_lines(path, [{"version": 1}])
    with path.open("ab") as file:
        file.write(b'{"versi')
    assert read_lines(path, json.loads, repair=False) == [{"version": 1}]
    assert path.read_bytes().endswith(b'{"versi')
    assert read_lines(path, json.loads) == [{"version": 1}]
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    "append", [append_line, lambda path, content: append_json_lines(path, [{"long": str(content)}])]
)
def test_a_line_that_found_no_room_is_no_part_of_the_next(append, tmp_path):
    path = tmp_path / "events.jsonl"
    append_line(path, b'{"sequence": 1}')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append(path, b'{"sequence": 2}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append_line(path, b'{"sequence": 2}')
    assert read_lines(path, json.loads) == [{"sequence": 1}, {"sequence": 2}]
