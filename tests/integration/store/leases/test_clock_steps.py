"""A clock of PostgreSQL that is set, by an hour to either side, ends and delays nothing.

The server's clock cannot be set for a test alone. Setting it is the same as moving all moments that were written before, and
what the store sees of the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.store.v1 import failure_pb2, rollout_pb2
from fulmen_service_kit.security.tokens import Role, TokenSigner
from fulmen_store.database.queries import SQL
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, running_store

LIMIT_S = 30
HOUR = "interval '1 hour'"
AGAIN = rollout_pb2.RolloutPolicy(max_attempts=3, retry_on=[failure_pb2.FAILURE_KIND_INFRA])


@pytest.fixture
async def beside(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """Yields a connection of the test's own."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def move(beside: asyncpg.Connection, by: str) -> None:
    """Moves all moments that leases, timeouts and delays compare with the clock."""
    for table, columns in {
        "item": ["run_at", "leased_at", "hedge_leased_at", "cancel_by"],
        "rollout": ["created_at"],
        "runner_session": ["lease_until"],
        "run_lease": ["expires_at"],
        "replica": ["lease_until"],
    }.items():
        await beside.execute(f"update {table} set " + ", ".join(f"{each} = {each} + {by}" for each in columns))


class ClockOf:
    """Statements, of which the one that reads the clock is ahead by some seconds."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def __getitem__(self, name: str) -> str:
        return SQL[name].replace("as now_s", f"+ {self._ahead_s} as now_s")


def look_shows(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Lets the store see a clock that was set, from now on."""
    monkeypatch.setattr("fulmen_store.database.database.SQL", ClockOf(by_s))


async def test_a_rollout_that_was_created_while_the_clock_was_ahead_runs_at_once_afterwards(
    store: StoreHandle, stubs: Stubs, beside: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = await create(stubs)
    await move(beside, HOUR)
    look_shows(monkeypatch, -3600.0)
    async with asyncio.timeout(LIMIT_S):
        (held,) = await (await Runner(stubs).open()).take(1)
    assert held.rollout.name == name


async def test_a_retry_of_that_time_waits_for_its_back_off_alone(
    store: StoreHandle, stubs: Stubs, beside: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(stubs, policy=AGAIN)
    runner = await Runner(stubs).open()
    (first,) = await runner.take(1)
    await runner.complete([first], failure_kind=failure_pb2.FAILURE_KIND_INFRA)
    await move(beside, HOUR)
    look_shows(monkeypatch, -3600.0)
    async with asyncio.timeout(LIMIT_S):
        (second,) = await runner.take(1)
    assert second.rollout.name == first.rollout.name


async def test_a_store_that_starts_after_the_clock_was_set_back_mends_what_it_finds(
    database_url: str, beside: asyncpg.Connection
) -> None:
    async with running_store(database_url) as store:
        (name,) = await create(await store.stubs())
    await move(beside, HOUR)
    async with running_store(database_url) as store, asyncio.timeout(LIMIT_S):
        (held,) = await (await Runner(await store.stubs()).open()).take(1)
    assert held.rollout.name == name


async def test_a_rollout_with_a_not_before_time_still_waits_for_it(
    store: StoreHandle, stubs: Stubs, beside: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Timestamp()
    later.FromSeconds(int(time.time()) + 3600)
    await create(stubs, not_before_time=later)
    await create(stubs)
    await beside.execute(f"update item set run_at = run_at + {HOUR} where run_at <= now()")
    await beside.execute(f"update rollout set created_at = created_at + {HOUR}")
    look_shows(monkeypatch, -3600.0)
    runner = await Runner(stubs).open()
    async with asyncio.timeout(LIMIT_S):
        await runner.take(1)
    assert await beside.fetchval("select count(*) from item where session is null and run_at > now()") == 1


async def test_leases_of_that_time_are_as_long_as_all_others(
    store: StoreHandle, stubs: Stubs, beside: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(stubs)
    runner = await Runner(stubs).open()
    await runner.take(1)
    await move(beside, HOUR)
    look_shows(monkeypatch, -3600.0)
    async with asyncio.timeout(LIMIT_S):
        while await beside.fetchval("select count(*) from item where leased_at > now()"):  # noqa: ASYNC110  # a table
            await asyncio.sleep(0.01)
        while await beside.fetchval(  # noqa: ASYNC110  # a table
            "select count(*) from runner_session where lease_until > now() + interval '10 seconds'"
        ):
            await asyncio.sleep(0.01)


@pytest.mark.long(short=True)
async def test_no_attempt_is_lost_or_timed_out_when_the_clock_is_set_ahead(
    store: StoreHandle, beside: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As `fulmen up` gives its services: a token of less than an hour would have expired.
    stubs = await store.stubs(token=TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="runner", ttl_s=86_400))
    await create(stubs, policy=rollout_pb2.RolloutPolicy(max_attempts=1))
    runner = await Runner(stubs).open()
    (held,) = await runner.take(1)
    # One transaction with what the store sees: no sweep comes between.
    look_shows(monkeypatch, 3600.0)
    async with beside.transaction():
        await move(beside, f"- {HOUR}")
    async with asyncio.timeout(LIMIT_S):
        # The runner renews its lease by talking, as it would.
        while await beside.fetchval("select count(*) from runner_session where lease_until < now()"):
            await runner.demand(1)
            await asyncio.sleep(0.2)
        # Twice as long as the store holds back.
        for _ in range(24):
            await runner.demand(1)
            await asyncio.sleep(0.5)
    await runner.complete([held])
    assert await beside.fetchval("select count(*) from attempt where state = 2") == 1
    assert await beside.fetchval("select count(*) from attempt") == 1
