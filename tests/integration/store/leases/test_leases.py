"""Leases: credits are never exceeded, ends are fenced, lost leases are retried, replicas never double."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import Draining, SessionEnded
from fulmen.ids import parse_attempt_name, runner_name
from fulmen.store.v1 import failure_pb2, lease_pb2, lease_service_pb2, rollout_pb2
from fulmen_service_kit.security.tokens import Role, TokenVerifier
from tests.support.store.rollouts import renewing
from tests.support.store.running import (
    SIGNING_KEY,
    Runner,
    StoreHandle,
    Stubs,
    cancel,
    create,
    get,
    queue_stats,
    report,
    running_store,
)

APPLIED = lease_pb2.COMPLETION_STATUS_APPLIED
DUPLICATE = lease_pb2.COMPLETION_STATUS_DUPLICATE
LEASE_LOST = lease_pb2.COMPLETION_STATUS_LEASE_LOST
INVALID = lease_pb2.COMPLETION_STATUS_INVALID


async def test_work_is_pushed_within_the_credit_and_not_beyond(stubs: Stubs) -> None:
    await create(stubs, 20)
    runner = await Runner(stubs).open()
    assert len(await runner.take(3)) == 3
    # The answer comes after everything that was sent before it: nothing more was handed out meanwhile.
    assert await runner.complete([_unknown()]) == [LEASE_LOST]
    stats = await queue_stats(stubs)
    assert (stats.running_count, stats.queued_count, stats.open_credit_count) == (3, 17, 0)
    assert not [message for message in runner.inbox if message.WhichOneof("message") == "assign"]
    assert len(await runner.take(17)) == 17


async def test_credit_that_waits_gets_work_as_soon_as_it_is_created(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    await runner.demand(2)
    (name,) = await create(stubs, input=b"in")
    (assignment,) = (await runner.expect("assign")).assignments
    assert assignment.rollout.name == name
    assert assignment.rollout.input == b"in"
    assert (assignment.lease_id, assignment.epoch) == (runner.session_id, 1)
    assert assignment.timeout.seconds == 900
    caller = TokenVerifier(SIGNING_KEY).verify(assignment.attempt_key)
    assert caller.role is Role.ATTEMPT
    assert caller.attempt == parse_attempt_name(assignment.attempt)
    assert (caller.lease_id, caller.epoch, caller.mode) == (runner.session_id, 1, "train")


async def test_a_token_budget_travels_in_the_attempts_key(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    for policy, budget in (({"model_token_budget": 5000}, 5000), ({}, 0)):
        await create(stubs, policy=policy)
        (assignment,) = await runner.take(1)
        assert TokenVerifier(SIGNING_KEY).verify(assignment.attempt_key).terms.token_budget == budget
        assert assignment.rollout.policy.model_token_budget == budget


async def test_a_success_is_recorded_once_with_its_rewards(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    runner = await Runner(stubs).open()
    assignments = await runner.take(1)
    result = {"rewards": [{"value": 0.5}, {"dimension": "style", "value": 1, "step": 2}], "output": b"42"}
    assert await runner.complete(assignments, **result) == [APPLIED]
    assert await runner.complete(assignments, **result) == [DUPLICATE]
    assert await runner.complete(assignments, failure_kind=failure_pb2.FAILURE_KIND_INFRA) == [LEASE_LOST]
    rollout = await get(stubs, name)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
    (attempt,) = rollout.attempts
    assert attempt.final
    assert (attempt.runner, attempt.runner_host) == (runner_name(runner.session_id), "test-host")
    assert [(reward.dimension, reward.value) for reward in attempt.rewards] == [("reward", 0.5), ("style", 1.0)]
    assert attempt.output == b"42"


async def test_a_malformed_result_changes_nothing_and_the_lease_stays(stubs: Stubs) -> None:
    await create(stubs)
    runner = await Runner(stubs).open()
    assignments = await runner.take(1)
    assert await runner.complete(assignments, rewards=[{"value": float("nan")}]) == [INVALID]
    assert await runner.complete(assignments, failure_kind=failure_pb2.FAILURE_KIND_RELEASED) == [INVALID]
    assert await runner.complete(assignments) == [APPLIED]


async def test_failures_are_retried_by_their_kind_until_the_budget_is_used(stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(max_attempts=2, retry_backoff={"nanos": 1_000_000})
    (retried,) = await create(stubs, policy=policy)
    runner = await Runner(stubs).open()
    for epoch in (1, 2):
        assignments = await runner.take(1)
        assert assignments[0].epoch == epoch
        assert await runner.complete(
            assignments, failure_kind=failure_pb2.FAILURE_KIND_INFRA, failure_message="no backend"
        ) == [APPLIED]
    rollout = await get(stubs, retried)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_FAILED
    assert rollout.failure_kind == failure_pb2.FAILURE_KIND_INFRA
    assert [attempt.final for attempt in rollout.attempts] == [False, True]
    assert rollout.attempts[1].failure_message == "no backend"

    (not_retried,) = await create(stubs, policy=policy)
    await runner.complete(await runner.take(1), failure_kind=failure_pb2.FAILURE_KIND_AGENT_ERROR)
    assert (await get(stubs, not_retried)).state == rollout_pb2.ROLLOUT_STATE_FAILED


async def test_a_silent_runner_loses_its_leases_and_its_late_report_is_discarded(database_url: str) -> None:
    async with running_store(database_url, lease_ttl_s=2.0) as store:
        stubs = await store.stubs()
        (name,) = await create(stubs, policy=rollout_pb2.RolloutPolicy(retry_backoff={"nanos": 1_000_000}))
        silent = await Runner(stubs).open()
        assignments = await silent.take(1)
        successor = await Runner(stubs).open()
        async with renewing(successor):
            (again,) = await successor.take(1)
            assert (again.rollout.name, again.epoch) == (name, 2)
            assert await report(stubs, assignments) == [LEASE_LOST]
            with pytest.raises(SessionEnded):
                await silent.expect("assign")
            with pytest.raises(SessionEnded):
                await Runner(stubs).open(session_id=silent.session_id)
            assert await successor.complete([again]) == [APPLIED]
        rollout = await get(stubs, name)
        assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
        assert rollout.attempts[0].failure_kind == failure_pb2.FAILURE_KIND_LEASE_LOST


async def test_higher_priority_goes_first_among_what_the_labels_allow(stubs: Stubs) -> None:
    (special,) = await create(stubs, required_labels={"gpu": "h200"}, priority=50)
    low, normal, high = [(await create(stubs, priority=priority))[0] for priority in (-5, 0, 5)]
    ordinary = await Runner(stubs).open()
    assert [one.rollout.name for one in await ordinary.take(3)] == [high, normal, low]
    able = await Runner(stubs).open(labels={"gpu": "h200", "zone": "a"})
    assert [one.rollout.name for one in await able.take(1)] == [special]


async def test_a_simple_client_takes_and_completes_without_a_stream(stubs: Stubs) -> None:
    empty = await stubs.leases.AcquireLeases(lease_service_pb2.AcquireLeasesRequest(max_count=5))
    assert not empty.assignments
    waiting = asyncio.create_task(
        stubs.leases.AcquireLeases(
            lease_service_pb2.AcquireLeasesRequest(runner=empty.runner, max_count=5, wait={"seconds": 10})
        )
    )
    names = await create(stubs, 3)
    first = await waiting
    more = await stubs.leases.AcquireLeases(
        lease_service_pb2.AcquireLeasesRequest(runner=empty.runner, max_count=5, wait={"nanos": 200_000_000})
    )
    taken = [*first.assignments, *more.assignments]
    assert sorted(one.rollout.name for one in taken) == sorted(names)
    await cancel(stubs, taken[0].rollout.name)
    renewed = await stubs.leases.RenewLeases(lease_service_pb2.RenewLeasesRequest(runner=empty.runner))
    assert list(renewed.cancelled_attempts) == [taken[0].attempt]
    assert await report(stubs, taken[:2]) == [APPLIED, APPLIED]
    released = await stubs.leases.ReleaseLeases(lease_service_pb2.ReleaseLeasesRequest(runner=empty.runner))
    assert released.released_count == 1
    with pytest.raises(SessionEnded):
        await stubs.leases.RenewLeases(lease_service_pb2.RenewLeasesRequest(runner=empty.runner))


async def test_a_draining_store_says_so_and_keeps_the_leases(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    await create(stubs)
    runner = await Runner(stubs).open()
    assignments = await runner.take(1)
    drained = asyncio.create_task(store.parts.drain())
    await runner.expect("drain")
    for call in (
        Runner(stubs).open(),
        stubs.leases.AcquireLeases(lease_service_pb2.AcquireLeasesRequest(max_count=1)),
        runner.read(),
    ):
        with pytest.raises(Draining):
            await call
    await drained
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        resumed = await Runner(stubs).open(session_id=runner.session_id, running=[assignments[0].attempt])
        assert not resumed.opened.lost_attempts
        assert await resumed.complete(assignments) == [APPLIED]


def _unknown() -> lease_pb2.Assignment:
    return lease_pb2.Assignment(
        attempt="projects/default/rollouts/01900000-0000-7000-8000-000000000000/attempts/1",
        lease_id="01900000-0000-7000-8000-000000000001",
        epoch=1,
    )
