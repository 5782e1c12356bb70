"""A fresh database per test, and a store on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.postgres import shared_server
from tests.support.store.running import StoreHandle, Stubs, running_store


@pytest.fixture
def database_url() -> Iterator[str]:
    """Yields the URL of a database with the store's schema."""
    server = shared_server()
    dsn = server.fresh_database()
    yield dsn
    server.drop(dsn)


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a running store."""
    async with running_store(database_url) as handle:
        yield handle


@pytest.fixture
async def stubs(store: StoreHandle) -> Stubs:
    """Returns stubs of an administrator."""
    return await store.stubs()


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
