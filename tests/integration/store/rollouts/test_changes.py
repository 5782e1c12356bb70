"""Priority and deadline of a live rollout are changed, and hold from then on for whoever reads, schedules or retries it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, RolloutExists, RolloutNotFound, RolloutStateInvalid
from fulmen.ids import DEFAULT_PROJECT, rollout_name, uuid7
from fulmen.store.v1 import failure_pb2, rollout_pb2
from fulmen.store.v1 import rollout_selection_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2 as rollouts_pb
from tests.support.store.rollouts import moment, renewing
from tests.support.store.running import (
    Runner,
    StoreHandle,
    Stubs,
    cancel,
    create,
    get,
    meet,
    read_feed,
    replicas,
)

TIMEOUT = failure_pb2.FAILURE_KIND_TIMEOUT
FAILED = rollout_pb2.ROLLOUT_STATE_FAILED


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns short leases, after which the store ends overdue attempts."""
    return {"lease_ttl_s": 0.6}


async def update(stubs: Stubs, name: str, *paths: str, **fields: Any) -> rollout_pb2.Rollout:
    """Changes a rollout; without paths, the fields that are given."""
    request = pb.UpdateRolloutRequest(rollout=rollout_pb2.Rollout(name=name, **fields))
    request.update_mask.paths.extend(paths)
    changed: rollout_pb2.Rollout = (await stubs.rollouts.UpdateRollout(request)).rollout
    return changed


async def order_of(stubs: Stubs, count: int) -> list[str]:
    """Returns the rollouts that a runner gets, in order."""
    async with renewing(await Runner(stubs).open()) as runner:
        return [each.rollout.name for each in await runner.take(count)]


async def test_waiting_rollouts_go_in_the_order_of_their_changed_priorities(store: StoreHandle, stubs: Stubs) -> None:
    first, second, third = await create(stubs, 3, priority=1)
    delayed = (await create(stubs, priority=1, not_before_time=moment(0.2)))[0]
    assert (await update(stubs, third, priority=50)).priority == 50
    await update(stubs, first, "priority", priority=-50)
    await update(stubs, delayed, priority=-100)
    await store.parts.roles["project-follower"].follow_once()
    assert await order_of(stubs, 4) == [third, second, first, delayed]


async def test_another_replica_serves_the_changed_order(database_url: str) -> None:
    async with replicas(database_url, 2) as (here, there):
        stubs = await here.stubs()
        # All of them are known to the other replica.
        names = await create(await there.stubs(), 8)
        await update(stubs, names[-1], priority=9)
        await there.parts.roles["project-follower"].follow_once()
        await meet(here, there)
        assert (await order_of(await there.stubs(), 1)) == [names[-1]]


async def test_what_is_not_named_stays_and_what_is_named_and_unset_gets_its_default(stubs: Stubs) -> None:
    deadline = moment(3600)
    (name,) = await create(stubs, priority=7, deadline_time=deadline, input=b"x", metadata={"a": "b"})
    assert (await update(stubs, name, priority=8)).deadline_time == deadline
    later = moment(7200)
    changed = await update(stubs, name, "deadline_time", priority=1, deadline_time=later)
    assert (changed.priority, changed.deadline_time, changed.input, changed.metadata["a"]) == (8, later, b"x", "b")
    changed = await update(stubs, name, "*", priority=3)
    assert (changed.priority, changed.HasField("deadline_time")) == (3, False)
    assert (await update(stubs, name, "priority")).priority == 0
    assert await get(stubs, name) == await update(stubs, name, "priority")


async def test_changes_that_are_made_at_once_add_up(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    later = moment(3600)
    await asyncio.gather(
        *(update(stubs, name, priority=5) for _ in range(4)),
        *(update(stubs, name, deadline_time=later) for _ in range(4)),
    )
    changed = await get(stubs, name)
    assert (changed.priority, changed.deadline_time) == (5, later)


async def test_lists_select_and_show_the_changed_priority(stubs: Stubs) -> None:
    name, _ = await create(stubs, 2)
    await update(stubs, name, priority=5)
    page = await stubs.rollouts.ListRollouts(rollouts_pb.ListRolloutsRequest(filter="priority = 5"))
    assert [(each.name, each.priority) for each in page.rollouts] == [(name, 5)]


async def test_an_earlier_deadline_ends_what_waits_and_what_runs(stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(retry_on=[TIMEOUT], max_attempts=5)
    (running,) = await create(stubs, policy=policy)
    async with renewing(await Runner(stubs).open()) as runner:
        (assignment,) = await runner.take(1)
        (waiting,) = await create(stubs)
        for name in (running, waiting):
            await update(stubs, name, deadline_time=moment(0.5))
        assert list((await runner.expect("lease_lost")).attempts) == [assignment.attempt]
    groups, _ = await read_feed(stubs, groups=2)
    ended = {each.name: (each.state, each.failure_kind) for group in groups for each in group.rollouts}
    assert ended == {running: (FAILED, TIMEOUT), waiting: (FAILED, TIMEOUT)}


async def test_the_next_attempt_has_the_changed_deadline_and_a_retry_the_changed_priority(stubs: Stubs) -> None:
    (name,) = await create(stubs, deadline_time=moment(30), policy={"retry_backoff": {"nanos": 1_000_000}})
    async with renewing(await Runner(stubs).open()) as runner:
        (assignment,) = await runner.take(1)
        assert assignment.timeout.ToNanoseconds() <= 30e9
        await update(stubs, name, "*", priority=4)
        await runner.complete([assignment], failure_kind=failure_pb2.FAILURE_KIND_INFRA)
        (again,) = await runner.take(1)
        assert (again.rollout.name, again.rollout.priority) == (name, 4)
        assert again.timeout.ToNanoseconds() == 900e9
        await runner.complete([again])
    retried = (await stubs.rollouts.RetryRollouts(rollouts_pb.RetryRolloutsRequest(names=[name]))).rollouts[0]
    assert (await get(stubs, retried.name)).priority == 4


async def test_a_repeated_creation_is_recognized_after_a_change(stubs: Stubs) -> None:
    rollout = rollout_pb2.Rollout(name=rollout_name(DEFAULT_PROJECT, uuid7()), priority=1)
    request = rollouts_pb.BatchCreateRolloutsRequest(rollouts=[rollout])
    await stubs.rollouts.BatchCreateRollouts(request)
    (by_id,) = await create(stubs, request_id="once", priority=1)
    for name in (rollout.name, by_id):
        await update(stubs, name, priority=2)
        await update(stubs, name, priority=3)
    assert (await stubs.rollouts.BatchCreateRollouts(request)).rollouts[0].name == rollout.name
    assert await create(stubs, request_id="once", priority=1) == [by_id]
    rollout.priority = 3
    with pytest.raises(RolloutExists):
        await stubs.rollouts.BatchCreateRollouts(rollouts_pb.BatchCreateRolloutsRequest(rollouts=[rollout]))
    assert (await get(stubs, rollout.name)).priority == 3


async def test_every_problem_of_a_change_is_told_at_once_and_nothing_is_changed(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    with pytest.raises(ArgumentInvalid) as refused:
        await update(
            stubs, "rollouts/x", "priority", "deadline_time", "input", "mode", priority=101, deadline_time=moment(-1)
        )
    fields = [violation.field for violation in refused.value.violations]
    assert fields == ["rollout.name", "update_mask", "update_mask", "rollout.priority", "rollout.deadline_time"]
    with pytest.raises(ArgumentInvalid) as refused:
        await update(stubs, name)
    assert [violation.field for violation in refused.value.violations] == ["update_mask"]
    # What is not named does not count.
    assert (await update(stubs, name, "priority", priority=1, deadline_time=moment(-1))).priority == 1


async def test_only_a_live_rollout_that_can_be_read_is_changed(stubs: Stubs, connection: Any) -> None:
    unreadable, final = await create(stubs, 2)
    await cancel(stubs, final)
    await connection.execute("update rollout set request = '\\xffffff'")
    with pytest.raises(RolloutStateInvalid, match="final") as refused:
        await update(stubs, final, priority=1)
    assert refused.value.metadata == {"rollout": final, "state": "CANCELLED"}
    with pytest.raises(RolloutStateInvalid, match="cannot be read"):
        await update(stubs, unreadable, priority=1)
    with pytest.raises(RolloutNotFound):
        await update(stubs, rollout_name(DEFAULT_PROJECT, uuid7()), priority=1)
