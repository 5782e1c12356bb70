"""What the store knows of the attempts at each proxy: whose captures are missing, and which proxy was lost with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from fulmen.llm_proxy.v1 import capture_service_pb2
from tests.support.llm_proxy.limits_world import World, limits_world
from tests.support.store.running import LIMIT_S


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    """Yields two proxies on one store."""
    async with limits_world(database_url) as running:
        yield running


async def accounts(database_url: str) -> list[tuple[bool, int]]:
    """Returns the accounts in the store: whether each is open, and its calls."""
    connection = await asyncpg.connect(database_url)
    try:
        return [tuple(row) for row in await connection.fetch("select is_open, call_count from capture_account")]
    finally:
        await connection.close()


async def flushed(proxy: Any, attempt: str) -> capture_service_pb2.CaptureSummary:
    async with asyncio.timeout(LIMIT_S):
        while not (summary := await proxy.flush(attempt, timeout=5)).flushed:
            pass
    return summary


async def test_any_proxy_tells_of_the_calls_at_all_of_them(world: World, database_url: str) -> None:
    assignment = await world.attempt()
    first, second = world.proxies
    for proxy in (first, first, second):
        assert (await proxy.chat(assignment.attempt_key))[0] == 200
    for proxy in world.proxies:
        summary = await flushed(proxy, assignment.attempt)
        assert (summary.call_count, summary.lost) == (3, False)
    async with asyncio.timeout(LIMIT_S):
        while sorted(await accounts(database_url)) != [(False, 1), (False, 2)]:  # noqa: ASYNC110  # state of a database
            await asyncio.sleep(0.05)


async def test_a_flush_waits_for_a_call_in_flight_at_another_proxy(world: World, database_url: str) -> None:
    assignment = await world.attempt()
    first, second = world.proxies
    world.backend.switches.gate = asyncio.Event()
    call = asyncio.create_task(first.chat(assignment.attempt_key))
    await world.backend.arrived.acquire()
    async with asyncio.timeout(LIMIT_S):
        while await accounts(database_url) != [(True, 1)]:  # noqa: ASYNC110  # state of a database
            await asyncio.sleep(0.05)
    assert not (await second.flush(assignment.attempt, timeout=1)).flushed
    world.backend.switches.gate.set()
    assert (await call)[0] == 200
    summary = await flushed(second, assignment.attempt)
    assert (summary.call_count, summary.lost) == (1, False)


async def test_an_open_account_of_a_proxy_that_is_gone_means_lost_captures(world: World, database_url: str) -> None:
    lost, kept = await world.attempt(), await world.attempt()
    first, second = world.proxies
    for assignment in (lost, kept):
        assert (await first.chat(assignment.attempt_key))[0] == 200
        assert (await flushed(second, assignment.attempt)).call_count == 1
    connection = await asyncpg.connect(database_url)
    # As if a proxy had been killed with a call in flight, eleven seconds ago.
    await connection.execute(
        "insert into proxy values ('gone', 'projects/*', false, now() - interval '11 seconds', null)"
    )
    await connection.execute(
        "insert into capture_account select rollout_id, attempt, project_id, 'gone', scope, true, 1, 0, 0, 0, 0, 0"
        " from capture_account where rollout_id = $1",
        lost.rollout.name.rpartition("/")[2],
    )
    await connection.close()
    assert (await flushed(second, lost.attempt)).lost
    assert not (await flushed(second, kept.attempt)).lost


async def test_a_gone_proxy_that_served_alone_may_have_lost_captures_of_all_attempts_of_its_time(
    world: World, database_url: str
) -> None:
    before = await world.attempt()
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "insert into proxy values ('gone', 'projects/*', true, now() - interval '13 seconds', null)"
    )
    await connection.execute("update item set leased_at = leased_at - interval '20 seconds'")
    await connection.close()
    after = await world.attempt()
    assert (await flushed(world.proxies[0], before.attempt)).lost
    assert not (await flushed(world.proxies[0], after.attempt)).lost
