"""A full disk pauses a run and never ends it: on a real file system that is full, through the service's own parts."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fulmen_algorithm.runs import storage_wait
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.run import RunState, TrainingRun
from fulmen_algorithm.sinks.prometheus import RunMetrics
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import Service, created, notices, service_at, with_settings, working
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.training import check_books, read_consumed

SIZE = 24 * 2**20
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields the folder of a file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if LIBC.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={SIZE}".encode()):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        LIBC.umount2(str(folder).encode(), 2)


def fill(folder: Path) -> Path:
    """Fills the file system to the last block."""
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return path


@pytest.fixture
def service_on(small_disk: Path, tmp_path: Path) -> Callable[[World], Service]:
    return lambda world: service_at(tmp_path / "state", world, storage=str(small_disk))


async def until_it_waits(service: Service, run: TrainingRun, small_disk: Path) -> tuple[Entry, Path]:
    """Lets a run take a step and fills its disk; returns the run, which waits, and the file to remove."""
    entry = service.runs.entry(run.name)

    async def begun() -> bool:
        return entry.run.step >= 1

    async def waits() -> bool:
        return "full" in entry.waiting_reason

    await eventually(begun, what="the run takes a step")
    filling = fill(small_disk)
    await eventually(waits, what="the run waits for its disk")
    return entry, filling


@pytest.mark.parametrize(("algorithm", "steps"), [("grpo", 20), ("sft", 150)])
async def test_a_run_waits_while_its_disk_is_full_and_resumes_by_itself(
    algorithm, steps, world, grpo_draft, sft_draft, small_disk, service_on, monkeypatch
):
    monkeypatch.setattr(storage_wait, "FIRST_WAIT_S", 0.05)
    draft = {"grpo": grpo_draft, "sft": sft_draft}[algorithm]
    run = await created(with_settings(draft, steps=steps, checkpoint_every=1), world)
    async with working(service_on(world)) as service:
        service.runs.add(run)
        entry, filling = await until_it_waits(service, run, small_disk)
        assert entry.run.state is RunState.RUNNING
        assert metric(service, "fulmen_algorithm_run_waits_for_storage") == 1
        assert not world.cancelled
        filling.unlink()
        done = await service.finish(run)
        assert (done.state, done.step) == (RunState.SUCCEEDED, steps), done.failure_message
        assert entry.waiting_reason == ""
        assert any("can be written again" in text for text in notices(entry))
    assert not [rollout for group in world.feed for rollout in group.rollouts if rollout.failure == "CANCELLED"]
    if algorithm == "grpo":
        check_books(read_consumed(small_disk / "runs/default/small"), [g.group_id for g in world.feed], steps=steps)


async def test_a_run_that_waits_for_its_disk_can_be_paused(world, sft_draft, small_disk, service_on, monkeypatch):
    monkeypatch.setattr(storage_wait, "FIRST_WAIT_S", 0.05)
    run = await created(with_settings(sft_draft, steps=400, checkpoint_every=1), world)
    async with working(service_on(world)) as service:
        service.runs.add(run)
        entry, filling = await until_it_waits(service, run, small_disk)
        service.runs.pause(run.name)
        filling.unlink()

        async def paused() -> bool:
            return entry.run.state is RunState.PAUSED

        await eventually(paused, what="the run is paused")


def metric(service: Service, name: str) -> float:
    families = {family.name: family for family in RunMetrics(service.runs).collect()}
    return sum(sample.value for sample in families[name].samples)
