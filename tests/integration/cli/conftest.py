"""A store on a fresh database per test."""

from __future__ import annotations

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
