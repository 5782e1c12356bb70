"""Cancelling: at once where nothing runs, by the runner where something does, by the store where the runner is silent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fulmen.store.v1 import failure_pb2, lease_pb2, rollout_pb2
from tests.support.store.rollouts import renewing
from tests.support.store.running import (
    Runner,
    Stubs,
    cancel,
    create,
    get,
    read_feed,
    report,
    running_store,
    until_state,
)

CANCELLED = rollout_pb2.ROLLOUT_STATE_CANCELLED
QUICK = {"lease_ttl_s": 0.6, "cancel_grace_s": 0.3}


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns short leases, time limits and grace periods."""
    return QUICK


async def test_a_cancel_ends_within_the_grace_although_the_runner_is_silent(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    async with renewing(await Runner(stubs).open()) as runner:
        (assignment,) = await runner.take(1)
        assert await cancel(stubs, name) == (0, 1)
        assert list((await runner.expect("cancel")).attempts) == [assignment.attempt]
        assert list((await runner.expect("lease_lost")).attempts) == [assignment.attempt]
        rollout = await get(stubs, name)
        assert (rollout.state, rollout.failure_kind) == (CANCELLED, failure_pb2.FAILURE_KIND_CANCELLED)
        assert rollout.attempts[0].failure_kind == failure_pb2.FAILURE_KIND_CANCELLED
        statuses = await runner.complete([assignment], rewards=[{"value": 1}])
        assert statuses == [lease_pb2.COMPLETION_STATUS_LEASE_LOST]
        assert (await get(stubs, name)).state == CANCELLED


async def test_a_repeated_cancel_does_not_extend_the_grace(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    async with renewing(await Runner(stubs).open()) as runner:
        await runner.take(1)

        async def insist() -> None:
            while True:
                await cancel(stubs, name)
                await asyncio.sleep(0.05)

        insisting = asyncio.create_task(insist())
        await until_state(stubs, name, CANCELLED)
        insisting.cancel()


async def test_a_runner_at_another_replica_hears_of_the_cancel_and_of_its_end(database_url: str) -> None:
    async with running_store(database_url, **QUICK) as one, running_store(database_url, **QUICK) as two:
        stubs = await one.stubs()
        (name,) = await create(stubs)
        async with renewing(await Runner(await two.stubs()).open()) as runner:
            (assignment,) = await runner.take(1)
            await cancel(stubs, name)
            assert list((await runner.expect("lease_lost")).attempts) == [assignment.attempt]
            assert (await get(stubs, name)).state == CANCELLED


async def test_a_runner_that_reports_within_the_grace_decides_when_the_cancel_ends(database_url: str) -> None:
    async with running_store(database_url, cancel_grace_s=60.0) as store:
        stubs = await store.stubs()
        names = await create(stubs, 2, group_id="g", group_size=2)
        runner = await Runner(stubs).open()
        assignments = await runner.take(2)
        await cancel(stubs, *names)
        statuses = await report(stubs, assignments, failure_kind=failure_pb2.FAILURE_KIND_CANCELLED)
        assert set(statuses) == {lease_pb2.COMPLETION_STATUS_APPLIED}
        (group,), _ = await read_feed(stubs, groups=1)
        assert {rollout.state for rollout in group.rollouts} == {CANCELLED}
