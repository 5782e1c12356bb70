"""The store's own timers: what is over ends although nobody reports and nobody calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.ids import uuid7
from fulmen.store.v1 import failure_pb2, lease_pb2, rollout_pb2
from fulmen_store.database.database import connect
from fulmen_store.leases.table import OverdueReason, OverdueTable
from fulmen_store.projects.names import ProjectNames
from tests.support.store.rollouts import moment, renewing
from tests.support.store.running import (
    LIMIT_S,
    Runner,
    Stubs,
    create,
    get,
    read_feed,
    running_store,
    until_state,
)

LEASE_LOST = lease_pb2.COMPLETION_STATUS_LEASE_LOST
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


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns short leases, time limits and grace periods."""
    return QUICK


async def test_a_live_runner_that_never_reports_is_timed_out_by_the_store(stubs: Stubs) -> None:
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


async def test_a_waiting_rollout_fails_when_its_deadline_passes(stubs: Stubs) -> None:
    (name,) = await create(stubs, deadline_time=moment(1.0), required_labels={"gpu": "none has it"})
    (group,), _ = await read_feed(stubs, groups=1)
    (rollout,) = group.rollouts
    assert (rollout.name, rollout.state, rollout.failure_kind) == (name, FAILED, TIMEOUT)
    assert not rollout.attempts


async def test_a_running_rollout_fails_at_its_deadline_and_its_runner_is_told(stubs: Stubs) -> None:
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


async def test_several_replicas_look_at_once_and_each_end_is_written_once(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as one, running_store(database_url, **QUICK) as two:
        stubs = await one.stubs()
        waiting = await create(
            stubs,
            40,
            deadline_time=moment(1.0),
            required_labels={"gpu": "none has it"},
            training_run="projects/default/trainingRuns/w",
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
