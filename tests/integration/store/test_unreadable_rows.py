"""Rows that hold bytes which no message has: they stop nothing, and what is known of them is told."""

from __future__ import annotations

import asyncpg
import pytest

from fulmen.errors import RolloutStateInvalid
from fulmen.store.v1 import failure_pb2, lease_pb2, lease_service_pb2, rollout_pb2, runner_registry_service_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.store.running import Runner, Stubs, create, get, read_feed, until_state

FAILED = rollout_pb2.ROLLOUT_STATE_FAILED
SUCCEEDED = rollout_pb2.ROLLOUT_STATE_SUCCEEDED
NO_MESSAGE = b"\xff\xff\xff"


async def damage(database_url: str, statement: str, *arguments: object) -> None:
    """Overwrites what a statement selects with bytes that no message has."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(statement, NO_MESSAGE, *arguments)
    await connection.close()


async def test_an_unreadable_request_is_not_handed_out_and_holds_up_nothing(stubs: Stubs, database_url: str) -> None:
    (bad,) = await create(stubs, 1, policy={"max_attempts": 1}, task_type="sums")
    await damage(database_url, "update rollout set request = $1")
    good = await create(stubs, 2)
    runner = await Runner(stubs).open()
    await runner.demand(2)
    taken: list[lease_pb2.Assignment] = []
    while len(taken) < 2:
        taken += (await runner.expect("assign")).assignments
    # The credit of the one that was not handed out is still there.
    assert sorted(one.rollout.name for one in taken) == sorted(good)
    assert await runner.complete(taken) == [lease_pb2.COMPLETION_STATUS_APPLIED] * 2
    rollout = await until_state(stubs, bad, FAILED)
    assert rollout.failure_kind == failure_pb2.FAILURE_KIND_INFRA
    assert rollout.failure_message == rollout.attempts[0].failure_message == "The stored data cannot be read."
    listed = (await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter="state = FAILED"))).rollouts
    assert [(one.name, one.failure_message) for one in listed] == [(bad, rollout.failure_message)]
    with pytest.raises(RolloutStateInvalid, match="cannot be read"):
        await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(names=[bad]))
    with pytest.raises(RolloutStateInvalid, match="cannot be read"):
        await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(filter="state = FAILED"))


async def test_an_unreadable_request_is_not_handed_out_to_one_who_asks_for_leases(
    stubs: Stubs, database_url: str
) -> None:
    (bad,) = await create(stubs, 1, policy={"max_attempts": 1})
    await damage(database_url, "update rollout set request = $1")
    request = lease_service_pb2.AcquireLeasesRequest(max_count=5, info=lease_pb2.RunnerInfo(host="test"))
    request.wait.seconds = 5
    assert not (await stubs.leases.AcquireLeases(request)).assignments
    await until_state(stubs, bad, FAILED)


async def test_an_unreadable_report_leaves_the_rollout_readable_and_in_the_feed(
    stubs: Stubs, database_url: str
) -> None:
    runner = await Runner(stubs).open()
    (name,) = await create(stubs, 1)
    await runner.complete(await runner.take(1))
    await until_state(stubs, name, SUCCEEDED)
    await damage(database_url, "update attempt set report = $1")
    (attempt,) = (await get(stubs, name)).attempts
    assert (attempt.final, attempt.failure_message) == (True, "The stored data cannot be read.")
    (group,), _ = await read_feed(stubs, groups=1)
    assert [one.name for one in group.rollouts] == [name]


async def test_an_unreadable_runner_is_listed_by_its_name(stubs: Stubs, database_url: str) -> None:
    runner = await Runner(stubs).open(labels={"zone": "a"})
    await damage(database_url, "update runner_session set info = $1, load = $1")
    listed = await stubs.runners.ListRunners(runner_registry_service_pb2.ListRunnersRequest())
    assert [one.name.rpartition("/")[2] for one in listed.runners] == [runner.session_id]
