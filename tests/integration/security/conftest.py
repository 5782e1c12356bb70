"""A store on a fresh database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.store.running import StoreHandle, Stubs, running_store


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a running store."""
    async with running_store(database_url) as handle:
        yield handle


@pytest.fixture
async def stubs(store: StoreHandle) -> Stubs:
    """Returns stubs of an administrator."""
    return await store.stubs()
