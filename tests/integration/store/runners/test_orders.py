"""Orders of people: recorded first, passed down the stream of whichever replica the runner is connected to, until confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid, PermissionDenied, RunnerNotFound
from fulmen.ids import runner_name, uuid7
from fulmen.store.v1 import lease_pb2, lease_service_pb2
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, replicas

POLL_S = 0.02


async def order_slots(stubs: Stubs, name: str, count: int) -> pb.Runner:
    return (await stubs.runners.SetRunnerSlots(pb.SetRunnerSlotsRequest(name=name, slot_count=count))).runner


async def confirm(runner: Runner, number: int, *, limit: int = 0) -> None:
    load = lease_pb2.RunnerLoad(slots=lease_pb2.SlotLoad(limit_count=limit)) if limit else None
    renewal = lease_service_pb2.RenewSession(load=load, done_order=number)
    await runner.stream.write(lease_service_pb2.StreamLeasesRequest(renew=renewal))


async def until(stubs: Stubs, name: str, wanted: Callable[[pb.Runner], bool]) -> pb.Runner:
    async with asyncio.timeout(LIMIT_S):
        while not wanted(found := (await stubs.runners.GetRunner(pb.GetRunnerRequest(name=name))).runner):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    runner: pb.Runner = found
    return runner


async def test_an_order_reaches_the_runner_and_is_pending_until_confirmed(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    name = runner_name(runner.session_id)
    ordered = await order_slots(stubs, name, 5)
    assert (ordered.order.number, ordered.order.slots.slot_count, ordered.order_pending) == (1, 5, True)
    assert not ordered.order.HasField("drain")
    told = await runner.expect("order")
    assert (told.number, told.slots.slot_count, told.slots.automatic) == (1, 5, False)
    await confirm(runner, 1, limit=5)
    done = await until(stubs, name, lambda found: not found.order_pending)
    assert done.load.slots.limit_count == 5


async def test_orders_of_two_kinds_add_up_and_the_last_of_each_kind_counts(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    name = runner_name(runner.session_id)
    await order_slots(stubs, name, 5)
    await stubs.runners.SetRunnerSlots(pb.SetRunnerSlotsRequest(name=name, automatic=True))
    drained = await stubs.runners.DrainRunner(pb.DrainRunnerRequest(name=name, grace=Duration(seconds=7)))
    assert drained.runner.order.number == 3
    told = await runner.expect("order")
    while told.number < 3:
        told = await runner.expect("order")
    assert (told.slots.automatic, told.slots.slot_count, told.drain.grace.seconds) == (True, 0, 7)
    # Who confirms more than was ordered confirms what was ordered.
    await confirm(runner, 99)
    await until(stubs, name, lambda found: not found.order_pending)
    assert (await order_slots(stubs, name, 2)).order_pending


async def test_a_runner_that_was_away_gets_the_order_when_it_is_back(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    runner.stream.cancel()
    name = runner_name(runner.session_id)
    await order_slots(stubs, name, 4)
    back = await Runner(stubs).open(session_id=runner.session_id)
    assert (await back.expect("order")).slots.slot_count == 4
    # Not confirmed, so that the next stream brings it again.
    back.stream.cancel()
    again = await Runner(stubs).open(session_id=runner.session_id)
    assert (await again.expect("order")).number == 1


async def test_an_order_finds_its_runner_at_another_replica(database_url: str) -> None:
    async with replicas(database_url, 2) as (here, there):
        runner = await Runner(await there.stubs()).open()
        await order_slots(await here.stubs(), runner_name(runner.session_id), 3)
        assert (await runner.expect("order")).slots.slot_count == 3


async def test_an_order_finds_its_runner_without_a_hint(database_url: str) -> None:
    async with replicas(database_url, 2, notify_peers=False) as (here, there):
        runner = await Runner(await there.stubs()).open()
        await order_slots(await here.stubs(), runner_name(runner.session_id), 3)
        assert (await runner.expect("order")).slots.slot_count == 3


async def test_leases_are_acquired_without_a_stream_as_if_nothing_was_ordered(stubs: Stubs) -> None:
    request = lease_service_pb2.AcquireLeasesRequest(max_count=1, wait=Duration(nanos=1_000_000))
    name = (await stubs.leases.AcquireLeases(request)).runner
    await order_slots(stubs, name, 3)
    again = lease_service_pb2.AcquireLeasesRequest(runner=name, max_count=1, wait=Duration(nanos=1_000_000))
    assert not (await stubs.leases.AcquireLeases(again)).assignments
    assert (await until(stubs, name, lambda found: True)).order_pending


async def test_only_who_has_access_to_all_projects_of_a_runner_may_order_it(store: StoreHandle, stubs: Stubs) -> None:
    own = await store.stubs(role=Role.RUNNER, project="projects/default")
    of_all, of_one = await Runner(stubs).open(), await Runner(own).open()
    for role in (Role.ADMIN, Role.SERVICE):
        bound = await store.stubs(role=role, project="projects/default")
        with pytest.raises(PermissionDenied):
            await order_slots(bound, runner_name(of_all.session_id), 3)
        ordered = await order_slots(bound, runner_name(of_one.session_id), 3)
        assert ordered.project == "projects/default"
    for role in (Role.READER, Role.CLIENT, Role.RUNNER):
        with pytest.raises(PermissionDenied):
            await order_slots(await store.stubs(role=role), runner_name(of_one.session_id), 3)
    other = await store.stubs(project="projects/other")
    with pytest.raises(RunnerNotFound):
        await order_slots(other, runner_name(of_one.session_id), 3)


async def test_what_no_runner_could_do_is_refused(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    name = runner_name(runner.session_id)
    for count, automatic in ((0, False), (10_001, False), (-1, False), (1, True)):
        with pytest.raises(ArgumentInvalid):
            await stubs.runners.SetRunnerSlots(
                pb.SetRunnerSlotsRequest(name=name, slot_count=count, automatic=automatic)
            )
    for grace in (Duration(seconds=-1), Duration(seconds=3601)):
        with pytest.raises(ArgumentInvalid):
            await stubs.runners.DrainRunner(pb.DrainRunnerRequest(name=name, grace=grace))
    for absent in (runner_name(uuid7()), "nonsense", ""):
        with pytest.raises(RunnerNotFound):
            await order_slots(stubs, absent, 1)
