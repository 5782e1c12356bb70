"""Attempts are bounded by the durations of their task type, for the runner and for the store alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid
from fulmen.store.v1 import failure_pb2, lease_pb2, lease_service_pb2, rollout_pb2
from fulmen_store.scheduling.duration_sketch import bucket_of
from tests.support.store.running import Runner, Stubs, create, get, running_store, until_state

LIMIT_S = 20.0
TYPE = "t"
POLICY = rollout_pb2.RolloutPolicy(attempt_timeout_quantile=0.95, attempt_timeout_factor=2, max_attempts=1)
LEARN = """
insert into task_duration (task_type, bucket, count) select id, $2, $3 from interned_name where name = $1
"""


async def take_one(stubs: Stubs, runner: Runner, policy: rollout_pb2.RolloutPolicy = POLICY) -> lease_pb2.Assignment:
    """Creates a rollout and takes it."""
    await create(stubs, task_type=TYPE, policy=policy)
    [assignment] = await runner.take(1)
    return assignment


async def take_bounded(stubs: Stubs, runner: Runner) -> lease_pb2.Assignment:
    """Takes rollouts until the replica has read the durations of their type."""
    async with asyncio.timeout(LIMIT_S):
        while (taken := await take_one(stubs, runner)).timeout.seconds > 100:
            await runner.complete([taken])
        return taken


async def renew(runner: Runner) -> None:
    """Keeps a session alive until cancelled."""
    while True:
        await runner.stream.write(lease_service_pb2.StreamLeasesRequest(renew=lease_service_pb2.RenewSession()))
        await asyncio.sleep(0.1)


async def test_an_attempt_gets_the_bound_of_its_task_type(stubs: Stubs, connection: Any) -> None:
    runner = await Runner(stubs).open()
    first = await take_one(stubs, runner)
    # Nothing is known yet.
    assert first.timeout.seconds == 900
    await runner.complete([first])
    await connection.execute(LEARN, TYPE, bucket_of(10.0), 100)
    bounded = await take_bounded(stubs, runner)
    assert bounded.timeout.ToTimedelta().total_seconds() == pytest.approx(20.0, rel=0.02)
    async with asyncio.timeout(LIMIT_S):
        while True:
            [attempt] = (await get(stubs, bounded.rollout.name)).attempts
            if attempt.timeout.seconds < 900:
                break
            await asyncio.sleep(0.02)
    # The assignment has it to the nanosecond.
    assert abs(attempt.timeout.ToMilliseconds() - bounded.timeout.ToMilliseconds()) <= 1
    # Others of the type have their own timeout, and none is above it.
    assert (await take_one(stubs, runner, rollout_pb2.RolloutPolicy())).timeout.seconds == 900
    short = rollout_pb2.RolloutPolicy()
    short.CopyFrom(POLICY)
    short.attempt_timeout.FromSeconds(5)
    assert (await take_one(stubs, runner, short)).timeout.seconds == 5
    runner.stream.cancel()


async def test_the_store_ends_an_attempt_that_its_runner_does_not_end_at_its_bound(
    database_url: str, connection: Any
) -> None:
    async with running_store(database_url, attempt_grace_s=0.0, lease_ttl_s=1.0) as handle:
        stubs = await handle.stubs()
        runner = await Runner(stubs).open()
        await runner.complete([await take_one(stubs, runner)])
        await connection.execute(LEARN, TYPE, bucket_of(0.01), 100)
        bounded = await take_bounded(stubs, runner)
        assert bounded.timeout.ToMilliseconds() == 1000
        alive = asyncio.create_task(renew(runner))
        failed = await until_state(stubs, bounded.rollout.name, rollout_pb2.ROLLOUT_STATE_FAILED)
        alive.cancel()
        assert failed.failure_kind == failure_pb2.FAILURE_KIND_TIMEOUT
        runner.stream.cancel()


async def test_a_malformed_bound_is_refused_with_every_problem(stubs: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(attempt_timeout_quantile=1.5, attempt_timeout_factor=0.5)
    with pytest.raises(ArgumentInvalid) as raised:
        await create(stubs, policy=policy)
    assert {each.field for each in raised.value.violations} == {
        "rollouts[0].policy.attempt_timeout_quantile",
        "rollouts[0].policy.attempt_timeout_factor",
    }
    with pytest.raises(ArgumentInvalid, match="needs attempt_timeout_quantile"):
        await create(stubs, policy=rollout_pb2.RolloutPolicy(attempt_timeout_factor=2))
