"""Leases: credits are never exceeded, ends are fenced, lost leases are retried, replicas never double."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import Draining, PermissionDenied, SessionEnded
from fulmen.ids import parse_attempt_name, runner_name
from fulmen.store.v1 import failure_pb2, lease_pb2, lease_service_pb2, rollout_pb2, runner_registry_service_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.tokens import Role, TokenVerifier
from tests.support.store.running import (
    SIGNING_KEY,
    Runner,
    StoreHandle,
    Stubs,
    create,
    get,
    results_of,
    running_store,
    until_state,
)

APPLIED = lease_pb2.COMPLETION_STATUS_APPLIED
DUPLICATE = lease_pb2.COMPLETION_STATUS_DUPLICATE
LEASE_LOST = lease_pb2.COMPLETION_STATUS_LEASE_LOST
INVALID = lease_pb2.COMPLETION_STATUS_INVALID


async def test_work_is_pushed_within_the_credit_and_not_beyond(stubs: Stubs) -> None:
    await create(stubs, 20)
    runner = await Runner(stubs).open()
    assert len(await runner.take(3)) == 3
    # An answer that comes after everything that was sent before it: nothing more was handed out meanwhile.
    assert await runner.complete([_unknown()]) == [LEASE_LOST]
    stats = await stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest())
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
        assert TokenVerifier(SIGNING_KEY).verify(assignment.attempt_key).token_budget == budget
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


async def test_a_released_lease_costs_no_attempt(stubs: Stubs) -> None:
    (name,) = await create(stubs, policy=rollout_pb2.RolloutPolicy(max_attempts=1))
    runner = await Runner(stubs).open()
    for _ in range(3):
        (assignment,) = await runner.take(1)
        await runner.stream.write(
            lease_service_pb2.StreamLeasesRequest(
                release=lease_service_pb2.ReleasedAttempts(attempts=[assignment.attempt])
            )
        )
        assert [ack.status for ack in (await runner.expect("ack")).acks] == [APPLIED]
    assert await runner.complete(await runner.take(1)) == [APPLIED]
    rollout = await get(stubs, name)
    assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
    assert len(rollout.attempts) == 4


async def test_a_silent_runner_loses_its_leases_and_its_late_report_is_discarded(database_url: str) -> None:
    async with running_store(database_url, lease_ttl_s=2.0) as store:
        stubs = await store.stubs()
        (name,) = await create(stubs, policy=rollout_pb2.RolloutPolicy(retry_backoff={"nanos": 1_000_000}))
        silent = await Runner(stubs).open()
        assignments = await silent.take(1)
        successor = await Runner(stubs).open()
        keeper = asyncio.create_task(_keep_alive(successor))
        (again,) = await successor.take(1)
        assert (again.rollout.name, again.epoch) == (name, 2)
        late = await stubs.leases.CompleteAttempts(
            lease_service_pb2.CompleteAttemptsRequest(results=results_of(assignments))
        )
        assert [ack.status for ack in late.acks] == [LEASE_LOST]
        with pytest.raises(SessionEnded):
            await silent.expect("assign")
        with pytest.raises(SessionEnded):
            await Runner(stubs).open(session_id=silent.session_id)
        assert await successor.complete([again]) == [APPLIED]
        keeper.cancel()
        rollout = await get(stubs, name)
        assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
        assert rollout.attempts[0].failure_kind == failure_pb2.FAILURE_KIND_LEASE_LOST


async def test_a_cancelled_rollout_of_a_dead_runner_ends_as_cancelled(database_url: str) -> None:
    async with running_store(database_url, lease_ttl_s=0.6) as store:
        stubs = await store.stubs()
        (name,) = await create(stubs)
        runner = await Runner(stubs).open()
        await runner.take(1)
        runner.stream.cancel()
        await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[name]))
        rollout = await until_state(stubs, name, rollout_pb2.ROLLOUT_STATE_CANCELLED)
        assert len(rollout.attempts) == 1


async def test_a_resumed_session_keeps_listed_leases_and_gives_back_the_others(stubs: Stubs) -> None:
    await create(stubs, 2)
    runner = await Runner(stubs).open()
    kept, dropped = await runner.take(2)
    runner.stream.cancel()
    gone = "projects/default/rollouts/01900000-0000-7000-8000-000000000000/attempts/1"
    resumed = await Runner(stubs).open(session_id=runner.session_id, running=[kept.attempt, gone])
    assert resumed.session_id == runner.session_id
    assert list(resumed.opened.lost_attempts) == [gone]
    (again,) = await resumed.take(1)
    assert (again.rollout.name, again.epoch) == (dropped.rollout.name, 2)
    assert await resumed.complete([kept, again]) == [APPLIED, APPLIED]


async def test_work_goes_only_to_runners_with_the_required_labels(stubs: Stubs) -> None:
    (special,) = await create(stubs, required_labels={"gpu": "h200"}, priority=50)
    (plain,) = await create(stubs)
    ordinary = await Runner(stubs).open()
    await ordinary.demand(2)
    (first,) = (await ordinary.expect("assign")).assignments
    assert first.rollout.name == plain
    able = await Runner(stubs).open(labels={"gpu": "h200", "zone": "a"})
    assert [one.rollout.name for one in await able.take(1)] == [special]


async def test_higher_priority_goes_first(stubs: Stubs) -> None:
    low, normal, high = [(await create(stubs, priority=priority))[0] for priority in (-5, 0, 5)]
    runner = await Runner(stubs).open()
    assert [one.rollout.name for one in await runner.take(3)] == [high, normal, low]


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
    await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[taken[0].rollout.name]))
    renewed = await stubs.leases.RenewLeases(lease_service_pb2.RenewLeasesRequest(runner=empty.runner))
    assert list(renewed.cancelled_attempts) == [taken[0].attempt]
    done = await stubs.leases.CompleteAttempts(lease_service_pb2.CompleteAttemptsRequest(results=results_of(taken[:2])))
    assert [ack.status for ack in done.acks] == [APPLIED, APPLIED]
    released = await stubs.leases.ReleaseLeases(lease_service_pb2.ReleaseLeasesRequest(runner=empty.runner))
    assert released.released_count == 1
    with pytest.raises(SessionEnded):
        await stubs.leases.RenewLeases(lease_service_pb2.RenewLeasesRequest(runner=empty.runner))


async def test_runners_that_are_connected_are_listed(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    await create(stubs)
    await runner.take(1)
    (listed,) = (await stubs.runners.ListRunners(runner_registry_service_pb2.ListRunnersRequest())).runners
    assert (listed.name, listed.info.host, listed.running_count) == (runner_name(runner.session_id), "test-host", 1)


async def test_only_runners_may_lease(store: StoreHandle) -> None:
    client = await store.stubs(role=Role.CLIENT)
    with pytest.raises(PermissionDenied):
        await client.leases.AcquireLeases(lease_service_pb2.AcquireLeasesRequest(max_count=1))
    runner = await store.stubs(role=Role.RUNNER)
    await runner.leases.AcquireLeases(lease_service_pb2.AcquireLeasesRequest(max_count=1))
    with pytest.raises(PermissionDenied):
        await create(runner)


async def test_a_draining_store_says_so_and_keeps_the_leases(database_url: str) -> None:
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        await create(stubs)
        runner = await Runner(stubs).open()
        assignments = await runner.take(1)
        drained = asyncio.create_task(store.parts.drain())
        await runner.expect("drain")
        with pytest.raises(Draining):
            await Runner(stubs).open()
        with pytest.raises(Draining):
            await stubs.leases.AcquireLeases(lease_service_pb2.AcquireLeasesRequest(max_count=1))
        with pytest.raises(Draining):
            await runner.read()
        await drained
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        resumed = await Runner(stubs).open(session_id=runner.session_id, running=[assignments[0].attempt])
        assert not resumed.opened.lost_attempts
        assert await resumed.complete(assignments) == [APPLIED]


async def test_two_replicas_on_one_database_never_hand_out_twice(database_url: str) -> None:
    async with (
        running_store(database_url, lease_ttl_s=60.0) as one,
        running_store(database_url, lease_ttl_s=60.0) as two,
    ):
        replicas = [await one.stubs(), await two.stubs()]
        runners = [await Runner(replicas[index % 2]).open() for index in range(4)]
        created = asyncio.gather(*(create(replicas[index % 2], 20) for index in range(20)))
        seen: list[str] = []

        async def work(runner: Runner) -> None:
            await runner.demand(10)
            # Counted once its report is acknowledged: of who is cut off before, the work is done again, and rightly so.
            while len(seen) < 400:
                taken = list((await runner.expect("assign")).assignments)
                await runner.complete(taken)
                seen.extend(one.rollout.name for one in taken)
                await runner.demand(len(taken))

        workers = [asyncio.create_task(work(runner)) for runner in runners]
        names = [name for batch in await created for name in batch]
        await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        for worker in workers:
            worker.cancel()
        assert len(seen) == len(set(seen))
        assert sorted(seen) == sorted(names)
        rollouts = await asyncio.gather(*(get(replicas[0], name) for name in names[:50]))
        assert {len(rollout.attempts) for rollout in rollouts} == {1}


async def _keep_alive(runner: Runner) -> None:
    while True:
        await runner.stream.write(lease_service_pb2.StreamLeasesRequest(renew=lease_service_pb2.RenewSession()))
        await asyncio.sleep(0.1)


def _unknown() -> lease_pb2.Assignment:
    return lease_pb2.Assignment(
        attempt="projects/default/rollouts/01900000-0000-7000-8000-000000000000/attempts/1",
        lease_id="01900000-0000-7000-8000-000000000001",
        epoch=1,
    )
