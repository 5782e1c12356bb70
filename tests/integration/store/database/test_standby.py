"""A standby answers lists and reports, never with less than was there when they were asked; without it the primary does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.database import standby
from fulmen_store.database.standby import READS
from tests.support.store.running import StoreHandle, Stubs, create, running_store
from tests.support.store.standby import Pair, run, running_pair

ROUNDS = 20
ASKED = f"select 1 from pg_stat_activity where application_name = 'fulmen-store' and query like '{READS}%'"


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Yields a primary with a standby."""
    async with running_pair() as both:
        yield both


@pytest.fixture
async def store(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StoreHandle]:
    """Yields a store that asks the standby again at once after it was away or late."""
    monkeypatch.setattr(standby, "PAUSE_S", 0.0)
    async with running_store(pair.dsn, standby_url=pair.dsn_of(pair.standby)) as handle:
        yield handle


async def listed(stubs: Stubs) -> set[str]:
    """Returns the names of all rollouts."""
    return {rollout.name for rollout in (await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest())).rollouts}


async def test_a_list_from_a_standby_has_what_was_created_before(pair: Pair, store: StoreHandle) -> None:
    stubs, created = await store.stubs(), set[str]()
    for _ in range(ROUNDS):
        created |= set(await create(stubs, 2))
        assert await listed(stubs) == created
    assert await run(pair.standby.dsn, ASKED)
    assert not await run(pair.primary.dsn, ASKED)


async def test_a_standby_that_is_late_is_not_asked_until_it_has_caught_up(pair: Pair, store: StoreHandle) -> None:
    stubs = await store.stubs()
    await run(pair.standby.dsn, "select pg_wal_replay_pause()")
    created = set(await create(stubs, 2))
    assert await listed(stubs) == created
    assert not await run(pair.standby.dsn, ASKED)

    await run(pair.standby.dsn, "select pg_wal_replay_resume()")
    assert await listed(stubs) == created
    assert await run(pair.standby.dsn, ASKED)


async def test_lists_do_without_a_standby_that_is_away_or_was_promoted(pair: Pair, store: StoreHandle) -> None:
    stubs = await store.stubs()
    await pair.go_on_alone()
    await run(pair.standby.dsn, "select pg_promote()")
    created = set(await create(stubs, 2))
    assert await listed(stubs) == created

    await asyncio.to_thread(pair.standby.kill)
    created |= set(await create(stubs, 2))
    assert await listed(stubs) == created


async def test_a_store_starts_without_its_standby(pair: Pair) -> None:
    await pair.go_on_alone()
    await asyncio.to_thread(pair.standby.kill)
    async with running_store(pair.dsn, standby_url=pair.dsn_of(pair.standby)) as handle:
        stubs = await handle.stubs()
        created = set(await create(stubs))
        assert await listed(stubs) == created
