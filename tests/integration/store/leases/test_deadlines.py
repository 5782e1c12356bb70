"""The store's own timers: what is over ends although nobody reports and nobody calls."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.ids import uuid7
from fulmen.store.v1 import failure_pb2, lease_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.database.database import HOT_SETTINGS, connect
from fulmen_store.database.queries import SQL
from fulmen_store.leases.table import OverdueReason, OverdueTable
from fulmen_store.projects.names import ProjectNames
from tests.support.rollouts import moment, renewing
from tests.support.store.running import LIMIT_S, Runner, Stubs, create, get, read_feed, running_store, until_state

LEASE_LOST = lease_pb2.COMPLETION_STATUS_LEASE_LOST
APPLIED = lease_pb2.COMPLETION_STATUS_APPLIED
FAILED = rollout_pb2.ROLLOUT_STATE_FAILED
TIMEOUT = failure_pb2.FAILURE_KIND_TIMEOUT
QUICK = {"lease_ttl_s": 0.6, "attempt_grace_s": 0.1, "cancel_grace_s": 0.2}

ADD_ITEMS = """
insert into item (
    id, project_id, sort_priority, group_size, max_attempts, retry_mask, backoff_ms, run_at, timeout_ms,
    session, leased_at, deadline, cancel_requested, cancel_by
)
select gen_random_uuid(), 1, 0, 1, 3, 24, 0, now(), 1000, $2, $3::timestamptz, $4::timestamptz, $5::timestamptz is not null, $5
from generate_series(1, $1::int)
"""


async def test_a_live_runner_that_never_reports_is_timed_out_by_the_store(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as store:
        stubs = await store.stubs()
        (name,) = await create(stubs, policy=rollout_pb2.RolloutPolicy(attempt_timeout={"nanos": 200_000_000}))
        async with renewing(await Runner(stubs).open()) as runner:
            (assignment,) = await runner.take(1)
            lost = await runner.expect("lease_lost")
            assert list(lost.attempts) == [assignment.attempt]
            rollout = await get(stubs, name)
            assert (rollout.state, rollout.failure_kind) == (FAILED, TIMEOUT)
            assert "did not report" in rollout.attempts[0].failure_message
            assert await runner.complete([assignment], rewards=[{"value": 1}]) == [LEASE_LOST]
            assert (await get(stubs, name)).state == FAILED


async def test_an_attempt_that_the_store_timed_out_is_retried_where_the_policy_says_so(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as store:
        stubs = await store.stubs()
        policy = rollout_pb2.RolloutPolicy(
            attempt_timeout={"nanos": 200_000_000}, retry_backoff={"nanos": 1_000_000}, retry_on=[TIMEOUT]
        )
        (name,) = await create(stubs, policy=policy)
        async with renewing(await Runner(stubs).open()) as runner:
            await runner.take(1)
            (again,) = await runner.take(1)
            assert (again.rollout.name, again.epoch) == (name, 2)
            assert await runner.complete([again]) == [APPLIED]


async def test_a_waiting_rollout_fails_when_its_deadline_passes(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as store:
        stubs = await store.stubs()
        (name,) = await create(stubs, deadline_time=moment(1.0), required_labels={"gpu": "none has it"})
        (group,), _ = await read_feed(stubs, groups=1)
        (rollout,) = group.rollouts
        assert (rollout.name, rollout.state, rollout.failure_kind) == (name, FAILED, TIMEOUT)
        assert not rollout.attempts


async def test_a_rollout_that_waits_again_after_a_failure_fails_when_its_deadline_passes(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as store:
        stubs = await store.stubs()
        policy = rollout_pb2.RolloutPolicy(retry_backoff={"nanos": 1_000_000}, retry_on=[TIMEOUT])
        (name,) = await create(stubs, policy=policy, deadline_time=moment(3.0))
        runner = await Runner(stubs).open()
        await runner.complete(await runner.take(1), failure_kind=TIMEOUT)
        rollout = await until_state(stubs, name, FAILED)
        assert [attempt.failure_kind for attempt in rollout.attempts] == [TIMEOUT]
        assert rollout.end_time.ToNanoseconds() >= rollout.deadline_time.ToNanoseconds()


async def test_a_running_rollout_fails_at_its_deadline_and_its_runner_is_told(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as store:
        stubs = await store.stubs()
        (name,) = await create(
            stubs, deadline_time=moment(3.0), policy=rollout_pb2.RolloutPolicy(retry_on=[TIMEOUT], max_attempts=5)
        )
        async with renewing(await Runner(stubs).open()) as runner:
            (assignment,) = await runner.take(1)
            assert 0 < assignment.timeout.ToNanoseconds() <= 3_000_000_000
            assert list((await runner.expect("lease_lost")).attempts) == [assignment.attempt]
            rollout = await get(stubs, name)
            assert (rollout.state, rollout.failure_kind) == (FAILED, TIMEOUT)
            assert "deadline" in rollout.attempts[0].failure_message
            assert await runner.complete([assignment]) == [LEASE_LOST]


async def test_no_retry_is_scheduled_past_the_deadline(stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(retry_backoff={"seconds": 60})
    (name,) = await create(stubs, deadline_time=moment(20), policy=policy)
    runner = await Runner(stubs).open()
    await runner.complete(await runner.take(1), failure_kind=failure_pb2.FAILURE_KIND_INFRA)
    rollout = await get(stubs, name)
    assert (rollout.state, rollout.failure_kind) == (FAILED, failure_pb2.FAILURE_KIND_INFRA)


async def test_a_deadline_that_has_passed_is_refused_at_once(stubs: Stubs) -> None:
    with pytest.raises(ArgumentInvalid) as caught:
        await create(stubs, deadline_time=moment(-1))
    assert [violation.field for violation in caught.value.violations] == ["rollouts[0].deadline_time"]


async def test_a_group_is_announced_once_when_the_deadline_ends_its_last_member(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as store:
        stubs = await store.stubs()
        group = {"group_id": "g", "group_size": 3}
        (late,) = await create(stubs, **group, deadline_time=moment(1.0), required_labels={"gpu": "none has it"})
        (cancelled,) = await create(stubs, **group, priority=-1)
        (retried,) = await create(stubs, **group, policy={"retry_backoff": {"nanos": 1_000_000}})
        async with renewing(await Runner(stubs).open()) as runner:
            await runner.complete(await runner.take(1), failure_kind=failure_pb2.FAILURE_KIND_INFRA)
            await stubs.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[cancelled]))
            await runner.complete(await runner.take(1))
            await until_state(stubs, late, FAILED)
            (alone,) = await create(stubs)
            await runner.complete(await runner.take(1))
        groups, _ = await read_feed(stubs, groups=2)
        assert [finished.group_id for finished in groups] == ["g", alone]
        states = {rollout.name: rollout.state for rollout in groups[0].rollouts}
        assert states == {
            late: FAILED,
            cancelled: rollout_pb2.ROLLOUT_STATE_CANCELLED,
            retried: rollout_pb2.ROLLOUT_STATE_SUCCEEDED,
        }


async def test_several_replicas_look_at_once_and_each_end_is_written_once(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as one, running_store(database_url, **QUICK) as two:
        stubs = await one.stubs()
        waiting = await create(
            stubs, 40, deadline_time=moment(1.0), required_labels={"gpu": "none has it"}, training_run="trainingRuns/w"
        )
        policy = rollout_pb2.RolloutPolicy(attempt_timeout={"nanos": 200_000_000})
        running = await create(stubs, 20, policy=policy)
        async with renewing(await Runner(await two.stubs()).open()) as runner:
            await runner.take(20)
            async with asyncio.timeout(LIMIT_S):
                for name in (*waiting, *running):
                    await until_state(stubs, name, FAILED)
        groups, _ = await read_feed(stubs, groups=60)
        assert len({group.group_id for group in groups}) == 60


async def test_what_is_overdue_is_named_with_its_reason(database_url: str, connection: Any) -> None:
    soon, past = "now() + interval '1 hour'", "now() - interval '1 minute'"
    later, before = [(await connection.fetchrow(f"select {text}"))[0] for text in (soon, past)]
    now = (await connection.fetchrow("select now()"))[0]
    cases = [
        (now, None, None, None),
        (now, later, later, None),
        (before, None, None, OverdueReason.TIMEOUT),
        (now, before, None, OverdueReason.DEADLINE),
        (now, before, before, OverdueReason.CANCEL_GRACE),
        (before, None, later, OverdueReason.TIMEOUT),
    ]
    sessions = [uuid7() for _ in cases]
    for session, (leased_at, deadline, cancel_by, _) in zip(sessions, cases, strict=True):
        await connection.execute(ADD_ITEMS, 1, session, leased_at, deadline, cancel_by)
    database = await connect(database_url, connections=2, start_limit_s=5)
    table = OverdueTable(database, ProjectNames(database))
    found = {one.session_id: one.reason for one in await table.overdue(attempt_grace_s=5, limit=100)}
    assert found == {session: case[3] for session, case in zip(sessions, cases, strict=True) if case[3] is not None}
    assert await table.overdue(attempt_grace_s=5, limit=1)
    await database.close()


async def test_looks_for_what_is_overdue_never_go_through_the_backlog(connection: Any) -> None:
    statements = {
        "overdue_attempts": ("item_leased", "30.0, 1000"),
        "fail_overdue_rollouts": ("item_by_deadline", "1000"),
    }
    for name in statements:
        await connection.execute(f"prepare {name} as {SQL[name]}")
    await connection.execute(ADD_ITEMS, 20000, None, None, None, None)
    later = (await connection.fetchrow("select now() + interval '1 hour'"))[0]
    now = (await connection.fetchrow("select now()"))[0]
    await connection.execute(ADD_ITEMS, 20, uuid7(), now, None, None)
    await connection.execute(ADD_ITEMS, 20, None, None, later, None)
    for name, (index, arguments) in statements.items():
        rows = await connection.fetch(f"explain (analyze, costs off, timing off) execute {name} ({arguments})")
        plan = "\n".join(row[0] for row in rows)
        assert index in plan, plan
        assert "Seq Scan on item" not in plan, plan


@pytest.fixture
async def connection(database_url: str) -> Any:
    """Yields a connection with the settings of the store."""
    opened = await asyncpg.connect(database_url, server_settings=HOT_SETTINGS)
    yield opened
    await opened.close()
