"""The registry: who runs, what, how well and how busy; and the watch of all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid, DatabaseUnavailable, Draining, RunnerNotFound
from fulmen.ids import parse_runner_name, runner_name
from fulmen.store.v1 import failure_pb2, lease_pb2
from fulmen.store.v1 import lease_service_pb2 as lease_pb
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from fulmen_store.runners import fleet as runner_registry
from fulmen_store.runners.fleet import FleetChanges, FleetWatcher
from fulmen_store.runners.table import RunnerView
from tests.support.store.manual_clock import ManualClock
from tests.support.store.rollouts import renewing
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, create, pages_of

BUSY = lease_pb2.RunnerLoad(
    cpu_ratio=0.5,
    memory_bytes=2**30,
    memory_limit_bytes=2**31,
    gpus=[lease_pb2.GpuLoad(model="NVIDIA H200", utilization_ratio=0.75, memory_bytes=1, memory_limit_bytes=2)],
)


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns leases so short that renewals are written more than once a second."""
    return {"lease_ttl_s": 2.0}


class Fleet:
    """A watch of the fleet, and what it knows of it."""

    def __init__(self, stubs: Stubs, **request: Any) -> None:
        self.stream = stubs.runners.WatchRunners(pb.WatchRunnersRequest(**request))
        self.runners: dict[str, pb.Runner] = {}
        self.messages = 0

    async def read(self) -> pb.WatchRunnersResponse:
        """Reads one message."""
        async with asyncio.timeout(LIMIT_S):
            message: pb.WatchRunnersResponse = await self.stream.read()
        self.runners.update((runner.name, runner) for runner in message.runners)
        for name in message.removed:
            del self.runners[name]
        self.messages += 1
        return message

    async def snapshot(self) -> None:
        """Reads to the end of the snapshot."""
        while not (await self.read()).snapshot_complete:
            pass


async def find(stubs: Stubs, session_id: str) -> pb.Runner:
    """Returns one runner."""
    response = await stubs.runners.GetRunner(pb.GetRunnerRequest(name=runner_name(session_id)))
    runner: pb.Runner = response.runner
    return runner


async def say(runner: Runner, load: lease_pb2.RunnerLoad | None = None) -> None:
    """Renews a session."""
    await runner.stream.write(lease_pb.StreamLeasesRequest(renew=lease_pb.RenewSession(load=load)))


async def until(stubs: Stubs, session_id: str, condition: Any) -> pb.Runner:
    """Waits until a runner is as it should be."""
    async with asyncio.timeout(LIMIT_S):
        while not condition(runner := await find(stubs, session_id)):  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.02)
    return runner


async def test_a_runner_is_shown_with_its_attempts_its_load_and_its_failures(stubs: Stubs) -> None:
    runner = await Runner(stubs).open(labels={"gpu": "h200"})
    async with renewing(runner):
        fresh = await find(stubs, runner.session_id)
        assert not fresh.HasField("load")
        assert (fresh.ended_count, fresh.failed_count, fresh.running_count) == (0, 0, 0)
        await create(stubs, 5)
        taken = await runner.take(5)
        await say(runner, BUSY)
        shown = await until(stubs, runner.session_id, lambda one: one.HasField("load"))
        assert (shown.load, shown.running_count, shown.info.labels["gpu"]) == (BUSY, 5, "h200")
        assert (shown.info.host, sorted(shown.attempts)) == ("test-host", sorted(one.attempt for one in taken))
        await runner.complete(taken[:2])
        await runner.complete(taken[2:3], failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
        await runner.complete(taken[3:4], failure_kind=failure_pb2.FAILURE_KIND_CANCELLED)
        await runner.release(taken[4:])
        shown = await until(stubs, runner.session_id, lambda one: one.ended_count == 3 and not one.running_count)
        assert (shown.failed_count, shown.load) == (1, BUSY)
        (listed,) = (await stubs.runners.ListRunners(pb.ListRunnersRequest())).runners
        listed.lease_expire_time.CopyFrom(shown.lease_expire_time)
        assert listed == shown


async def test_the_first_load_of_each_minute_is_kept_for_two_hours(
    stubs: Stubs, connection: asyncpg.Connection
) -> None:
    runner = await Runner(stubs).open()
    request = pb.ListRunnersRequest(with_load_history=True)

    async def told(load: lease_pb2.RunnerLoad) -> list[pb.RunnerLoadSample]:
        await say(runner, load)
        await until(stubs, runner.session_id, lambda one: one.load == load)
        (listed,) = (await stubs.runners.ListRunners(request)).runners
        return list(listed.load_history)

    # Two minutes at most pass in this test: of each, the first load counts.
    first = await told(BUSY)
    assert [sample.load for sample in first] == [BUSY]
    assert first[0].minute_time.seconds % 60 == 0
    await connection.execute("update runner_session set load_minute = load_minute + interval '1 hour'")
    assert await told(lease_pb2.RunnerLoad(cpu_ratio=0.1)) == first
    await connection.execute(
        "update runner_session set load_minute = null, loads = array_fill(loads[1], array[120]),"
        " load_minutes = array(select load_minutes[1] - n * interval '1 minute' from generate_series(120, 1, -1) n)"
    )
    later = await told(lease_pb2.RunnerLoad(cpu_ratio=0.2))
    assert len(later) == 120
    assert [sample.load.cpu_ratio for sample in later[-2:]] == [0.5, 0.2]
    minutes = [sample.minute_time.seconds for sample in later]
    assert minutes == sorted(set(minutes))
    assert not (await stubs.runners.ListRunners(pb.ListRunnersRequest())).runners[0].load_history
    assert not (await find(stubs, runner.session_id)).load_history


async def test_a_unary_runner_tells_its_load_and_is_told_what_it_holds(stubs: Stubs) -> None:
    await create(stubs, 3)
    taken = await stubs.leases.AcquireLeases(lease_pb.AcquireLeasesRequest(max_count=3, wait=Duration(seconds=10)))
    request = lease_pb.RenewLeasesRequest(runner=taken.runner, load=BUSY)
    renewed = await stubs.leases.RenewLeases(request)
    assert sorted(renewed.held_attempts) == sorted(one.attempt for one in taken.assignments)
    assert not renewed.cancelled_attempts
    request.ClearField("load")

    async def renew() -> None:
        while True:
            await stubs.leases.RenewLeases(request)
            await asyncio.sleep(0.1)

    alive = asyncio.create_task(renew())
    assert (await until(stubs, str(parse_runner_name(taken.runner)), lambda one: one.HasField("load"))).load == BUSY
    alive.cancel()


async def test_a_bad_measurement_is_brought_into_range(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    bad = lease_pb2.RunnerLoad(cpu_ratio=math.nan, memory_bytes=-1)
    bad.gpus.extend([lease_pb2.GpuLoad(model="x" * 100, utilization_ratio=7.0)] * 80)
    await say(runner, bad)
    load = (await until(stubs, runner.session_id, lambda one: one.HasField("load"))).load
    assert (load.cpu_ratio, load.memory_bytes, len(load.gpus)) == (0.0, 0, 64)
    assert (len(load.gpus[0].model), load.gpus[0].utilization_ratio) == (64, 1.0)


async def test_runners_are_listed_page_by_page_and_a_large_page_ends_early(
    stubs: Stubs, connection: asyncpg.Connection
) -> None:
    await connection.execute(
        "insert into runner_session (id, subject, project, host, info, lease_until)"
        " select gen_random_uuid(), 's', 'projects/*', 'h', '', now() + interval '1 hour' from generate_series(1, 80)"
    )
    pages = await pages_of(stubs.runners.ListRunners, pb.ListRunnersRequest(page_size=30))
    listed = [runner.name for page in pages for runner in page.runners]
    assert len(listed) == len(set(listed)) == 80
    big = lease_pb2.RunnerInfo(labels={str(n): "x" * 1000 for n in range(60)}).SerializeToString()
    await connection.execute("update runner_session set info = $1", big)
    page, rest = await pages_of(stubs.runners.ListRunners, pb.ListRunnersRequest(page_size=1000))
    assert 0 < len(page.runners) < 80
    assert [runner.name for runner in (*page.runners, *rest.runners)] == listed


async def test_who_is_gone_is_not_found(stubs: Stubs) -> None:
    for name in ("runners/x", "", "runners/00000000-0000-7000-8000-000000000000"):
        with pytest.raises(RunnerNotFound):
            await stubs.runners.GetRunner(pb.GetRunnerRequest(name=name))


async def test_a_watch_tells_the_fleet_then_who_comes_changes_and_goes(stubs: Stubs) -> None:
    first = await Runner(stubs).open(labels={"zone": "a"})
    fleet, only_b = Fleet(stubs), Fleet(stubs, labels={"zone": "b"})
    async with renewing(first):
        await fleet.snapshot()
        await only_b.snapshot()
        assert list(fleet.runners) == [runner_name(first.session_id)]
        assert not only_b.runners
        async with renewing(await Runner(stubs).open(labels={"zone": "b", "gpu": "no"})) as second:
            while len(fleet.runners) < 2:
                await fleet.read()
            await only_b.read()
            assert list(only_b.runners) == [runner_name(second.session_id)]
            await create(stubs, 2)
            await first.take(2)
            while fleet.runners[runner_name(first.session_id)].running_count < 2:
                await fleet.read()
        second.stream.cancel()
        while runner_name(second.session_id) in fleet.runners:
            await fleet.read()
        assert (await only_b.read()).removed == [runner_name(second.session_id)]


async def test_a_watch_with_too_many_labels_is_refused(stubs: Stubs) -> None:
    with pytest.raises(ArgumentInvalid):
        await Fleet(stubs, labels={str(n): "x" for n in range(65)}).read()


async def test_a_caller_of_one_project_sees_what_serves_it_and_its_own_attempts(
    store: StoreHandle, stubs: Stubs
) -> None:
    async with renewing(await Runner(stubs).open()) as runner:
        await create(stubs, 2)
        taken = await runner.take(2)
        await runner.complete(taken[:1])
        await until(stubs, runner.session_id, lambda one: one.ended_count == 1)
        stranger = await store.stubs(role=Role.CLIENT, project="projects/other")
        shown = await find(stranger, runner.session_id)
        assert (shown.running_count, list(shown.attempts), shown.ended_count) == (0, [], 0)
        fleet = Fleet(stranger)
        await fleet.snapshot()
        assert [one.running_count for one in fleet.runners.values()] == [0]


async def test_a_watch_ends_when_the_store_drains(store: StoreHandle, stubs: Stubs) -> None:
    fleet = Fleet(stubs)
    await fleet.snapshot()
    await store.parts.drain()
    with pytest.raises(Draining):
        await fleet.snapshot()


async def test_one_look_serves_all_watchers() -> None:
    table = CountedTable()
    table.gate.clear()
    board = FleetWatcher(table=table, interval_s=3600)
    role = asyncio.create_task(board.run())
    watchers = [watch(board) for _ in range(50)]
    first = [asyncio.create_task(anext(watcher)) for watcher in watchers]
    await table.until(looks=1)
    table.gate.set()
    async with asyncio.timeout(LIMIT_S):
        assert all([(await one).snapshot_complete for one in first])
    assert table.looks == [None]
    for watcher in watchers:
        await watcher.aclose()
    role.cancel()


async def test_nobody_is_looked_at_for_nobody() -> None:
    table = CountedTable()
    board = FleetWatcher(table=table, interval_s=0.001)
    role = asyncio.create_task(board.run())
    leaving, staying = watch(board), watch(board, project="projects/other")
    await anext(leaving)
    await anext(staying)
    await leaving.aclose()
    await table.until(looks=len(table.looks) + 2)
    table.looks.clear()
    await table.until(looks=5)
    assert set(table.looks) == {"projects/other"}
    await staying.aclose()
    role.cancel()


async def test_watchers_are_told_when_the_fleet_cannot_be_looked_at() -> None:
    table = CountedTable()
    board = FleetWatcher(table=table, interval_s=0.01)
    role = asyncio.create_task(board.run())
    watcher = watch(board)
    assert (await anext(watcher)).snapshot_complete
    table.error = DatabaseUnavailable("gone")
    with pytest.raises(DatabaseUnavailable):
        await anext(watcher)
    table.error = None
    again = watch(board)
    assert (await anext(again)).snapshot_complete
    await again.aclose()
    role.cancel()


async def test_a_quiet_fleet_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_registry, "KEEP_ALIVE_S", 5.0)
    clock = ManualClock()
    table = CountedTable()
    board = FleetWatcher(table=table, interval_s=0.001, clock=clock)
    role = asyncio.create_task(board.run())
    watcher = watch(board)
    assert (await anext(watcher)).snapshot_complete
    waiting = asyncio.create_task(anext(watcher))
    await table.until(looks=5)
    assert not waiting.done()
    clock.now_s = 5.0
    async with asyncio.timeout(LIMIT_S):
        empty = await waiting
    assert not empty.snapshot_complete
    assert not empty.runners
    await watcher.aclose()
    role.cancel()


def watch(board: FleetWatcher, *, project: str | None = None) -> AsyncGenerator[FleetChanges, None]:
    """Watches all runners of a project."""
    return board.follow(project=project, wanted=lambda _: True, stopping=lambda: False)


class CountedTable:
    """A fleet of nobody, that notes for whom it is looked at."""

    def __init__(self) -> None:
        self.looks: list[str | None] = []
        self.error: DatabaseUnavailable | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._asked = asyncio.Event()

    async def page(self, *, after: UUID, limit: int, project: str | None) -> list[RunnerView]:
        """Returns nobody."""
        self.looks.append(project)
        self._asked.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return []

    async def until(self, *, looks: int) -> None:
        """Waits until it was looked at so often."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.looks) < looks:
                self._asked.clear()
                await self._asked.wait()
