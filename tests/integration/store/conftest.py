"""A fresh database per test, and a store on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from fulmen_store.database.connections import HOT_SETTINGS
from fulmen_store.database.database import Database, connect
from tests.support.store.fixtures import store, store_settings, stubs
from tests.support.store.running import Stubs, running_store

__all__ = ["connection", "database", "fuzzed", "store", "store_settings", "stubs"]


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """Yields a connection with the settings of the store, under a name of its own."""
    opened = await asyncpg.connect(database_url, server_settings=HOT_SETTINGS | {"application_name": "tests"})
    yield opened
    await opened.close()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Yields connections as a part of the store has them."""
    opened = await connect(database_url, connections=3, start_limit_s=10)
    yield opened
    await opened.close()


@pytest.fixture
def fuzzed(database_url: str) -> Iterator[tuple[asyncio.AbstractEventLoop, Stubs]]:
    """Yields a loop that runs a store, and its stubs, for tests that are not coroutines themselves."""
    with asyncio.Runner() as runner:
        context = running_store(database_url)
        handle = runner.run(context.__aenter__())
        try:
            yield runner.get_loop(), runner.run(handle.stubs())
        finally:
            runner.run(context.__aexit__(None, None, None))
