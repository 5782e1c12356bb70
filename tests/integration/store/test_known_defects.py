"""What other stores of rollouts got wrong; Agent Lightning's did all of these.

Further tests of such defects are with the feature: `test_deadlines`, `test_cancel`, `test_leases`, `test_creation_races`,
`test_rollouts`, `test_spans_reading`, `test_backlog`, `test_process` and `tests/chaos`.
"""

from __future__ import annotations

import asyncio

import asyncpg

from fulmen.errors import Unavailable
from fulmen.store.v1 import failure_pb2, lease_pb2, lease_service_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.store.rollouts import moment, renewing
from tests.support.store.running import (
    LIMIT_S,
    Runner,
    Stubs,
    cancel,
    create,
    get,
    read_feed,
    results_of,
    running_store,
    until_state,
)
from tests.support.store.spans import append, chunk_of, stored

SUCCEEDED = rollout_pb2.ROLLOUT_STATE_SUCCEEDED
FAILED = rollout_pb2.ROLLOUT_STATE_FAILED
CANCELLED = rollout_pb2.ROLLOUT_STATE_CANCELLED
LEASE_LOST = lease_pb2.COMPLETION_STATUS_LEASE_LOST
AGENT_ERROR = failure_pb2.FAILURE_KIND_AGENT_ERROR
INFRA = failure_pb2.FAILURE_KIND_INFRA
CUT = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and application_name = 'fulmen-store'
"""
SHORT_LEASE_S = 2.0  # a runner that renews keeps it on a machine whose cores are busy
MAX_CONCURRENT = rollout_pb2.RolloutPolicy(retry_backoff={"nanos": 1_000_000}, max_attempts=100)


async def test_terminal_is_terminal(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    (waiting,) = await create(stubs)
    await cancel(stubs, waiting)
    ends = {waiting: CANCELLED}
    reports: list[lease_pb2.Assignment] = []
    for kind, state in ((0, SUCCEEDED), (AGENT_ERROR, FAILED)):
        (name,) = await create(stubs)
        taken = await runner.take(1)
        await runner.complete(taken, failure_kind=kind)
        reports += taken
        ends[name] = state
    for late in ({"failure_kind": INFRA}, {"rewards": [{"value": 1}]}, {"failure_kind": 6}):
        assert await runner.complete(reports, **late) == [LEASE_LOST, LEASE_LOST]
    assert await cancel(stubs, *ends) == (0, 0)
    await stubs.rollouts.RetryRollouts(pb.RetryRolloutsRequest(names=list(ends)))
    assert {name: (await get(stubs, name)).state for name in ends} == ends


async def test_heartbeats_count(database_url: str) -> None:
    async with running_store(database_url, lease_ttl_s=SHORT_LEASE_S) as store:
        stubs = await store.stubs()
        (kept,) = await create(stubs)
        async with renewing(await Runner(stubs).open()) as alive:
            assignments = await alive.take(1)
            # Two runners fall silent and are given up, one after the other, while this one only renews.
            (lost,) = await create(stubs, policy=MAX_CONCURRENT)
            for epoch in (1, 2):
                silent = await Runner(stubs).open()
                (taken,) = await silent.take(1)
                assert (taken.rollout.name, taken.epoch) == (lost, epoch)
                silent.stream.cancel()
                await _until_attempts(stubs, lost, epoch)
            assert await alive.complete(assignments) == [lease_pb2.COMPLETION_STATUS_APPLIED]
        rollout = await get(stubs, kept)
        assert (rollout.state, len(rollout.attempts)) == (SUCCEEDED, 1)


async def test_a_failure_between_pop_and_insert_loses_nothing(
    database_url: str, connection: asyncpg.Connection
) -> None:
    """Connections of the store are cut at random moments, so also between a choice and its commit, and after it."""
    async with running_store(database_url, lease_ttl_s=20.0) as store:
        stubs = await store.stubs()
        names = await create(stubs, 300, policy=MAX_CONCURRENT)
        runner = await Runner(stubs).open()
        await runner.demand(10)
        open_names = set(names)
        cuts = 0
        async with asyncio.timeout(60):
            while open_names:
                taken = list((await runner.expect("assign")).assignments)
                _, done, cut = await asyncio.gather(
                    runner.demand(len(taken)), _complete_surely(stubs, taken), connection.fetch(CUT)
                )
                open_names -= done
                cuts += len(cut)
        assert cuts > 10, "hardly a connection was cut"
        for name in names:
            await until_state(stubs, name, SUCCEEDED)
        groups, _ = await read_feed(stubs, groups=300)
        assert sorted(group.group_id for group in groups) == sorted(names)


async def test_things_expire_though_nobody_calls(database_url: str, connection: asyncpg.Connection) -> None:
    settings = {"lease_ttl_s": 0.6, "attempt_grace_s": 0.1, "cancel_grace_s": 0.1}
    async with running_store(database_url, **settings) as store:
        stubs = await store.stubs()
        (late,) = await create(stubs, deadline_time=moment(1.0), required_labels={"gpu": "none has it"})
        (silent,) = await create(stubs, policy=rollout_pb2.RolloutPolicy(max_attempts=1))
        runner = await Runner(stubs).open()
        await runner.take(1)
        runner.stream.cancel()
        # From here on no rpc is made: only the database is looked at.
        async with asyncio.timeout(LIMIT_S):
            while await connection.fetchval("select count(*) from rollout_end") < 2:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.05)
        kinds = {name: (await get(stubs, name)).failure_kind for name in (late, silent)}
        assert kinds == {
            late: failure_pb2.FAILURE_KIND_TIMEOUT,
            silent: failure_pb2.FAILURE_KIND_RUNNER_LOST,
        }


async def test_data_is_there_after_a_restart(database_url: str) -> None:
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        done, waiting = await create(stubs, 2, input=b"in", training_run="projects/default/trainingRuns/a")
        runner = await Runner(stubs).open()
        (assignment,) = await runner.take(1)
        done, waiting = (done, waiting) if assignment.rollout.name == done else (waiting, done)
        await append(stubs, chunk_of(assignment.attempt))
        await runner.complete([assignment], rewards=[{"value": 0.5}], output=b"42")
        (group,), cursor = await read_feed(stubs, groups=1)
        before = [await get(stubs, name) for name in (done, waiting)]
        spans = await stored(stubs, done)
    async with running_store(database_url) as store:
        stubs = await store.stubs()
        assert [await get(stubs, name) for name in (done, waiting)] == before
        assert await stored(stubs, done) == spans
        assert len(spans) == 1
        (again,), _ = await read_feed(stubs, groups=1)
        assert again == group
        runner = await Runner(stubs).open()
        await runner.complete(await runner.take(1))
        (rest,), _ = await read_feed(stubs, groups=1, cursor=cursor)
        assert rest.group_id == waiting
        page = await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(training_run="projects/default/trainingRuns/a"))
        assert {rollout.name for rollout in page.rollouts} == {done, waiting}


async def _until_attempts(stubs: Stubs, name: str, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await get(stubs, name)).ended_attempt_count < count:  # noqa: ASYNC110  # state of the store
            await asyncio.sleep(0.02)


async def _complete_surely(stubs: Stubs, taken: list[lease_pb2.Assignment]) -> set[str]:
    """Reports until the store has answered, as runners do; returns the rollouts that are final now."""
    request = lease_service_pb2.CompleteAttemptsRequest(results=results_of(taken))
    while True:
        try:
            acks = (await stubs.leases.CompleteAttempts(request)).acks
        except Unavailable:
            continue
        return {one.rollout.name for one, ack in zip(taken, acks, strict=True) if ack.status != LEASE_LOST}
