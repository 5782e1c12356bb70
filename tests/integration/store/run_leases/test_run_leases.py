"""Leases of training runs: one owner at a time, a greater epoch with each, and nothing of an older epoch after it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.errors import (
    ArgumentInvalid,
    PermissionDenied,
    RunLeaseHeld,
    RunLeaseLost,
    TrainingRunExists,
    TrainingRunNotFound,
)
from fulmen.store.v1 import resource_pb2, resource_service_pb2, rollout_pb2, rollout_service_pb2
from fulmen.store.v1 import run_lease_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle, Stubs, create_project

RUN = "projects/default/trainingRuns/one"
IDLE, WAITING, RUNNING = pb.RUN_LEASE_STATE_IDLE, pb.RUN_LEASE_STATE_WAITING, pb.RUN_LEASE_STATE_RUNNING


async def create(stubs: Stubs, run: str = RUN, **fields: Any) -> pb.RunLease:
    request = pb.CreateRunLeaseRequest(training_run=run, record=b"as created", **fields)
    return (await stubs.run_leases.CreateRunLease(request)).lease


async def acquire(stubs: Stubs, owner: str, run: str = RUN, *, ttl_s: float = 60, **fields: Any) -> pb.RunLease:
    request = pb.AcquireRunLeaseRequest(training_run=run, owner=owner, owner_address=f"{owner}:1", **fields)
    request.ttl.FromTimedelta(timedelta(seconds=ttl_s))
    return (await stubs.run_leases.AcquireRunLease(request)).lease


async def renew(stubs: Stubs, owner: str, *epochs: int, record: bytes = b"", ttl_s: float = 60) -> list[str]:
    leases = [pb.RenewedLease(training_run=RUN, epoch=epoch, record=record) for epoch in epochs]
    request = pb.RenewRunLeasesRequest(owner=owner, owner_address=f"{owner}:1", leases=leases)
    request.ttl.FromTimedelta(timedelta(seconds=ttl_s))
    return list((await stubs.run_leases.RenewRunLeases(request)).lost_training_runs)


async def release(stubs: Stubs, epoch: int, state: pb.RunLeaseState.ValueType, run: str = RUN) -> None:
    request = pb.ReleaseRunLeaseRequest(training_run=run, epoch=epoch, state=state, record=b"as released")
    await stubs.run_leases.ReleaseRunLease(request)


async def listed(stubs: Stubs, **fields: Any) -> list[pb.RunLease]:
    found: list[pb.RunLease] = []
    token = ""
    while True:
        page = await stubs.run_leases.ListRunLeases(pb.ListRunLeasesRequest(page_token=token, **fields))
        found += page.leases
        token = page.next_page_token
        if not token:
            return found


async def expire(connection: asyncpg.Connection, run: str = RUN, *, ago: str = "1 second") -> None:
    await connection.execute("update run_lease set expires_at = now() - $2::interval where name = $1", run, _delta(ago))


def _delta(text: str) -> timedelta:
    number, unit = text.split()
    return timedelta(**{f"{unit.removesuffix('s')}s": int(number)})


async def submit(stubs: Stubs, epoch: int, *, group: str = "train/0") -> None:
    rollout = rollout_pb2.Rollout(training_run=RUN, group_id=group)
    request = rollout_service_pb2.BatchCreateRolloutsRequest(
        rollouts=[rollout], request_id=f"{RUN}/{group}", run_fence=pb.RunFence(training_run=RUN, epoch=epoch)
    )
    await stubs.rollouts.BatchCreateRollouts(request)


async def publish(stubs: Stubs, epoch: int, *, content: bytes = b'{"path":"/x","sha256":"","kind":"full"}') -> None:
    version = resource_pb2.ResourceVersion(name="resources/policy.p", kind="policy", content=content)
    fence = pb.RunFence(training_run=RUN, epoch=epoch)
    request = resource_service_pb2.PublishResourcesRequest(resources=[version], run_fence=fence)
    await stubs.resources.PublishResources(request)


async def test_a_run_has_one_owner_until_its_lease_ends(stubs: Stubs, connection: asyncpg.Connection):
    assert (await create(stubs)).state == WAITING
    first = await acquire(stubs, "first")
    assert (first.owner, first.epoch, first.held, first.record) == ("first", 1, True, b"as created")
    with pytest.raises(RunLeaseHeld) as refused:
        await acquire(stubs, "second")
    assert refused.value.metadata["owner_address"] == "first:1"
    await expire(connection)
    assert (await acquire(stubs, "second")).epoch == 2
    assert await renew(stubs, "first", 1) == [RUN]
    with pytest.raises(RunLeaseLost):
        await release(stubs, 1, IDLE)


async def test_an_expired_lease_that_no_other_has_acquired_is_renewed(stubs: Stubs, connection: asyncpg.Connection):
    await create(stubs)
    await acquire(stubs, "first")
    await expire(connection, ago="1 hours")
    assert await renew(stubs, "first", 1, record=b"newer") == []
    (lease,) = await listed(stubs)
    assert (lease.held, lease.record, lease.epoch) == (True, b"newer", 1)


async def test_a_restarted_owner_takes_its_own_run_back_at_once(stubs: Stubs):
    await create(stubs)
    await acquire(stubs, "first")
    assert (await acquire(stubs, "first")).epoch == 2
    assert await renew(stubs, "first", 1) == [RUN]


async def test_epochs_go_on_after_those_of_files_that_are_newer_than_the_database(stubs: Stubs):
    await create(stubs)
    assert (await acquire(stubs, "first", after_epoch=41)).epoch == 42


async def test_names_and_request_ids_are_taken_once(stubs: Stubs):
    await create(stubs, request_id="r")
    for again in ({"run": RUN}, {"run": "projects/default/trainingRuns/two", "request_id": "r"}):
        with pytest.raises(TrainingRunExists):
            await create(stubs, **again)
    with pytest.raises(TrainingRunNotFound):
        await acquire(stubs, "first", run="projects/default/trainingRuns/none")


async def test_a_run_is_acquired_only_where_its_files_are(stubs: Stubs):
    await create(stubs, storage="here")
    with pytest.raises(RunLeaseHeld):
        await acquire(stubs, "first", storage="there")
    assert (await acquire(stubs, "first", storage="here")).storage == "here"


async def test_two_runs_of_one_policy_are_never_owned_at_once(stubs: Stubs, connection: asyncpg.Connection):
    for run in (RUN, "projects/default/trainingRuns/two"):
        await create(stubs, run, policy="p")
    await acquire(stubs, "first")
    await expire(connection)  # it waits for an owner, and still comes first
    with pytest.raises(RunLeaseHeld) as refused:
        await acquire(stubs, "second", "projects/default/trainingRuns/two")
    assert refused.value.metadata["training_run"] == RUN
    lease = await acquire(stubs, "second")
    await release(stubs, lease.epoch, IDLE)
    assert (await acquire(stubs, "second", "projects/default/trainingRuns/two")).held


async def test_a_run_is_changed_while_another_one_of_its_policy_runs_and_keeps_no_other_from_it(stubs: Stubs):
    two = "projects/default/trainingRuns/two"
    for run in (RUN, two):
        await create(stubs, run, policy="p")
    await acquire(stubs, "first")
    changed = await acquire(stubs, "second", two, for_change=True)
    with pytest.raises(RunLeaseHeld) as refused:
        await acquire(stubs, "third", two, for_change=True)  # one owner at a time, whatever for
    assert refused.value.metadata["training_run"] == two
    await release(stubs, changed.epoch, IDLE, two)
    with pytest.raises(RunLeaseHeld) as refused:
        await acquire(stubs, "second", two)
    assert refused.value.metadata["training_run"] == RUN

    # Its owner dies meanwhile: the policy is free all the same.
    await acquire(stubs, "second", two, for_change=True)
    await release(stubs, 1, IDLE)
    assert (await acquire(stubs, "first")).held


async def test_an_older_epoch_creates_cancels_publishes_and_points_nothing(
    stubs: Stubs, connection: asyncpg.Connection
):
    await create(stubs)
    await acquire(stubs, "first")
    await submit(stubs, 1)
    await publish(stubs, 1)
    await expire(connection)
    await acquire(stubs, "second")
    fence = pb.RunFence(training_run=RUN, epoch=1)
    cancel = rollout_service_pb2.CancelRolloutsRequest(training_run=RUN, run_fence=fence)
    alias = resource_service_pb2.SetAliasRequest(name="resources/policy.p/aliases/best", version=1, run_fence=fence)
    for call in (
        submit(stubs, 1, group="train/1"), publish(stubs, 1), stubs.rollouts.CancelRollouts(cancel),
        stubs.resources.SetAlias(alias),
    ):  # fmt: skip
        with pytest.raises(RunLeaseLost):
            await call
    await submit(stubs, 2, group="train/1")
    await publish(stubs, 2)
    states = (await stubs.rollouts.ListRollouts(rollout_service_pb2.ListRolloutsRequest(training_run=RUN))).rollouts
    assert [each.state for each in states] == [rollout_pb2.ROLLOUT_STATE_QUEUED] * 2


async def test_what_an_epoch_writes_is_committed_before_the_next_begins(stubs: Stubs, connection: asyncpg.Connection):
    """A takeover waits for the transaction that writes under the older epoch."""
    await create(stubs)
    await acquire(stubs, "first", ttl_s=1)
    transaction = connection.transaction()
    await transaction.start()
    assert await connection.fetchval("select epoch from run_lease where name = $1 for share", RUN) == 1
    await connection.execute("select pg_sleep(1.1)")  # the lease ends while the transaction writes
    taking = asyncio.create_task(acquire(stubs, "second"))
    blocked = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = 'fulmen-store'"
    )
    while not await connection.fetchval(blocked):
        assert not taking.done()
        await connection.execute("select pg_stat_clear_snapshot()")
    await transaction.commit()
    assert (await taking).epoch == 2


async def test_rollouts_of_a_run_without_an_owner_are_cancelled_after_the_limit(
    store: StoreHandle, stubs: Stubs, connection: asyncpg.Connection
):
    role = store.parts.roles["unowned-runs"]
    await create(stubs)
    await role.run_once()
    await acquire(stubs, "first")
    await submit(stubs, 1)
    await expire(connection, ago="59 minutes")
    await role.run_once()
    assert role.count == 1
    assert await state_of(stubs) == rollout_pb2.ROLLOUT_STATE_QUEUED
    await expire(connection, ago="61 minutes")
    await role.run_once()
    assert await state_of(stubs) == rollout_pb2.ROLLOUT_STATE_CANCELLED
    assert len(await listed(stubs, unowned_for=timedelta(hours=1))) == 1
    await acquire(stubs, "second")
    assert await listed(stubs, unowned_for=timedelta()) == []
    await role.run_once()
    assert role.count == 0


async def state_of(stubs: Stubs) -> int:
    (found,) = (await stubs.rollouts.ListRollouts(rollout_service_pb2.ListRolloutsRequest(training_run=RUN))).rollouts
    return found.state


async def test_lists_are_pages_of_bounded_size_and_show_what_has_changed(stubs: Stubs):
    for number in range(5):
        request = pb.CreateRunLeaseRequest(training_run=f"projects/default/trainingRuns/{number}", record=bytes(2**20))
        await stubs.run_leases.CreateRunLease(request)
    found = await listed(stubs)
    assert [each.training_run for each in found] == [f"projects/default/trainingRuns/{number}" for number in range(5)]
    page = await stubs.run_leases.ListRunLeases(pb.ListRunLeasesRequest(without_records=True))
    assert len(page.leases) == 5
    later = Timestamp()
    later.FromDatetime(datetime.now(UTC) + timedelta(hours=1))
    assert await listed(stubs, update_after_time=later) == []


async def test_every_problem_of_a_request_is_reported_at_once(stubs: Stubs):
    with pytest.raises(ArgumentInvalid) as refused:
        await acquire(stubs, "a b", ttl_s=0, after_epoch=-1)
    assert {each.field for each in refused.value.violations} == {"owner", "ttl", "after_epoch"}
    with pytest.raises(ArgumentInvalid):
        await create(stubs, policy="p" * 64)
    for malformed in ("", "trainingRuns/one", "projects/default", "projects/default/trainingRuns/", f"{RUN}/x"):
        for call in (create(stubs, malformed), acquire(stubs, "first", malformed)):
            with pytest.raises(ArgumentInvalid):
                await call


async def test_the_stages_of_a_training_are_recorded_together_or_not_at_all(store: StoreHandle, stubs: Stubs):
    def stages(*names: str) -> list[pb.NextStage]:
        return [pb.NextStage(training_run=RUN.replace("one", name), record=name.encode()) for name in names]

    await create(stubs, next_stages=stages("two", "three"), request_id="r", storage="s")
    recorded = {each.training_run.rpartition("/")[2]: each for each in await listed(stubs)}
    assert {name: each.record for name, each in recorded.items()} == {
        "one": b"as created",
        "two": b"two",
        "three": b"three",
    }
    assert {(each.state, each.storage, each.epoch) for each in recorded.values()} == {(WAITING, "s", 0)}
    for run, fields in (
        ("four", {"next_stages": stages("five", "two")}),
        ("four", {"next_stages": stages("five", "five")}),
        ("four", {"next_stages": stages("five"), "request_id": "r"}),
        ("one", {"next_stages": stages("five")}),
    ):
        with pytest.raises(TrainingRunExists):
            await create(stubs, RUN.replace("one", run), **fields)
    await create_project(stubs, "projects/other")
    elsewhere = pb.NextStage(training_run="projects/other/trainingRuns/x")
    with pytest.raises(PermissionDenied):
        await create(await store.stubs(role=Role.SERVICE, project="projects/default"), next_stages=[elsewhere])
    for bad in (
        [elsewhere],
        stages(*map(str, range(16))),
        [pb.NextStage(training_run=f"{RUN}-{n}", record=bytes(2**20)) for n in range(3)] + stages("six"),
        [pb.NextStage(training_run=f"{RUN}-5", policy="p" * 64)],
    ):
        with pytest.raises(ArgumentInvalid) as refused:
            await create(stubs, RUN.replace("one", "four"), next_stages=bad)
        assert all(each.field.startswith("next_stages") for each in refused.value.violations)
    assert len(await listed(stubs)) == 3


async def test_runs_of_the_same_id_in_two_projects_have_leases_and_policies_of_their_own(
    store: StoreHandle, stubs: Stubs
):
    await create_project(stubs, "projects/other")
    theirs = RUN.replace("default", "other")
    for run in (RUN, theirs):
        await create(stubs, run, policy="p", request_id="r")
        assert (await acquire(stubs, run[:14].replace("/", "-"), run)).held
    other = await store.stubs(role=Role.SERVICE, project="projects/other")
    assert [each.training_run for each in await listed(other)] == [theirs]
    for absent in (RUN, "projects/default/trainingRuns/none"):
        with pytest.raises(PermissionDenied):
            await acquire(other, "other", absent)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.sampled_from(["acquire", "renew", "release", "expire", "write"]), st.integers(0, 2)))
)
def test_leases_behave_like_their_model(fuzzed: Any, database_url: str, steps: list[tuple[str, int]]):
    loop, stubs = fuzzed
    loop.run_until_complete(_against_model(stubs, database_url, steps))


async def _against_model(stubs: Stubs, dsn: str, steps: list[tuple[str, int]]) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("delete from run_lease")
        await create(stubs)
        epoch, holder, live, released = 0, -1, False, True
        known = [0, 0, 0]  # the last epoch of each owner
        for step, owner in steps:
            mine = known[owner] == epoch and holder == owner
            try:
                match step:
                    case "acquire":
                        known[owner] = (await acquire(stubs, f"o{owner}")).epoch
                        assert not live or holder == owner
                        assert known[owner] == epoch + 1
                        epoch, holder, live, released = epoch + 1, owner, True, False
                    case "renew":
                        lost = await renew(stubs, f"o{owner}", known[owner])
                        assert (lost == []) == (mine and not released)
                        live = live or lost == []
                    case "release":
                        await release(stubs, known[owner], RUNNING)
                        assert known[owner] == epoch
                        live, released = False, True
                    case "expire":
                        await expire(connection)
                        live = False
                    case "write":
                        await publish(stubs, known[owner])
                        assert known[owner] == epoch
            except RunLeaseHeld:
                assert step == "acquire"
                assert live
                assert holder != owner
            except RunLeaseLost:
                assert step in ("release", "write")
                assert known[owner] != epoch
            (lease,) = await listed(stubs)
            assert (lease.epoch, lease.held) == (epoch, live)
    finally:
        await connection.close()
