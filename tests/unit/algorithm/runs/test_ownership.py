"""Runs with two services: one owns a run at a time, the other takes it over, and the first is fenced when it comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import RunLeaseHeld
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import (
    Service,
    created,
    notices,
    service_at,
    with_settings,
    working,
)
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.training import check_books, read_consumed


@pytest.fixture
def open_both(tmp_path: Path) -> Callable[[World], list[Service]]:
    """Returns what starts two services over a world and a shared folder of runs."""
    return lambda world: [service_at(tmp_path / name, world, storage=str(tmp_path / "shared")) for name in ("a", "b")]


@pytest.fixture
async def both(world: World, open_both: Callable[[World], list[Service]]) -> AsyncIterator[tuple[Service, Service]]:
    """Yields two services over a shared folder of runs, neither of which works."""
    first, second = open_both(world)
    with closing(first), closing(second):
        yield first, second


async def settled(service: Service, name: str) -> None:
    """Waits until a run occupies no slot of a service."""

    async def is_settled() -> bool:
        return name not in service.runs.active

    await eventually(is_settled, what=f"{name} occupies no slot")


async def test_a_run_that_hangs_is_taken_over_and_its_former_owner_is_fenced(tmp_path, world, grpo_draft, open_both):
    run = await created(with_settings(grpo_draft, checkpoint_every=1), world)
    first, second = open_both(world)
    going_on = asyncio.Event()
    world.crashes = Crashes(at_call=26, hangs=going_on)
    hanging = world.crashes.killed
    async with working(first), working(second):
        await first.ownership.create(run)
        first.runs.add(run)
        await hanging.wait()
        world.leases.lapse(run.name)
        await second.ownership.learn()
        second.runs.wake()
        await until_owned(second, run.name)
        going_on.set()
        await settled(first, run.name)
        done = await second.finish(run)
        assert done.state is RunState.SUCCEEDED, notices(second.runs.entry(run.name))
        await first.ownership.learn()
        entry = first.runs.entry(run.name)
        assert world.handed_over
        assert not entry.epoch
        await first.ownership.fresh(entry)
        assert entry.run.state is RunState.SUCCEEDED
    check_books(read_consumed(tmp_path / "shared/runs/default/small"), [g.group_id for g in world.feed], steps=4)


async def until_owned(service: Service, name: str) -> None:
    async def is_owned() -> bool:
        await service.ownership.learn()
        service.runs.wake()
        entry = service.runs.find(name)
        return entry is not None and entry.epoch > 0

    await eventually(is_owned, what=f"{name} has another owner")


async def test_a_run_that_another_service_owns_is_not_started_here(world, sft_draft, both):
    run = await created(sft_draft, world)
    first, second = both
    await first.ownership.create(run)
    first.runs.add(run)
    assert await first.ownership.acquire(first.runs.entry(run.name))
    await second.ownership.learn()
    there = second.runs.entry(run.name)
    assert there.elsewhere
    assert not await second.ownership.acquire(there)
    with pytest.raises(RunLeaseHeld):
        async with second.ownership.holding(there):
            raise AssertionError("it is held by the first")
    await first.ownership.release(first.runs.entry(run.name))
    await second.ownership.learn()
    assert await second.ownership.acquire(there)
    assert there.files.epoch == 2


async def test_a_run_whose_files_are_elsewhere_is_left_to_their_service(tmp_path, world, sft_draft):
    run = await created(sft_draft, world)
    with closing(service_at(tmp_path / "a", world)) as first, closing(service_at(tmp_path / "b", world)) as second:
        await first.ownership.create(run)
        first.runs.add(run)
        await second.ownership.learn()
        there = second.runs.entry(run.name)
        assert there.elsewhere
        assert not await second.ownership.acquire(there)
        assert await first.ownership.acquire(first.runs.entry(run.name))


async def test_a_waiting_run_is_changed_by_whichever_service_is_asked(world, sft_draft, both):
    run = await created(sft_draft, world)
    first, second = both
    await first.ownership.create(run)
    first.runs.add(run)
    await second.ownership.learn()
    paused = await second.worker.changed(run.name, lambda: second.runs.pause(run.name))
    assert paused.state is RunState.PAUSED
    await first.ownership.learn()
    entry = first.runs.entry(run.name)
    assert entry.stale
    await first.ownership.fresh(entry)
    assert entry.run.state is RunState.PAUSED
    assert (await first.worker.cancel(run.name)).state is RunState.CANCELLED


async def test_a_watch_of_a_run_that_moves_to_another_service_is_ended_by_it(world, sft_draft, both):
    run = await created(sft_draft, world)
    first, second = both
    await first.ownership.create(run)
    first.runs.add(run)
    events = first.runs.entry(run.name).events
    following = events.follow(events.last_sequence)
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    await second.ownership.learn()
    await second.ownership.acquire(second.runs.entry(run.name))
    await first.ownership.learn()
    with pytest.raises(Exception, match="Another service now owns this run"):
        await waiting


async def test_a_service_that_is_started_again_takes_its_runs_back_at_once(tmp_path, world, sft_draft, open_service):
    run = await created(sft_draft, world)
    service = open_service(world)
    service.runs.add(run)
    assert await service.ownership.acquire(service.runs.entry(run.name))
    service.close()  # killed: its lease has not ended
    async with working(open_service(world)) as service:
        done = await service.finish(run)
    assert done.state is RunState.SUCCEEDED
    assert RunFiles(tmp_path / "state/runs/default/small").epoch == 2


async def test_only_the_last_owner_of_a_policy_serves_it_again(world, sft_draft, both):
    run = replace(await created(sft_draft, world), name="projects/default/trainingRuns/small")
    first, second = both
    await first.ownership.create(run)
    first.runs.add(run)
    entry = first.runs.entry(run.name)
    await first.ownership.acquire(entry)
    first.runs.move(run.name, RunState.RUNNING)
    await first.ownership.renew()
    world.leases.lapse(run.name)
    await second.ownership.learn()
    await second.ownership.acquire(second.runs.entry(run.name))
    await second.ownership.renew()
    entry.epoch = 0
    await first.ownership.learn()
    assert not await first.ownership.serves("tiny", timeout_s=1)
    assert await second.ownership.serves("tiny", timeout_s=1)
    assert await first.ownership.serves("another", timeout_s=1)
