"""A running store per test, and stubs of an administrator; a conftest imports them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.store.running import StoreHandle, Stubs, running_store


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns the settings of `store`; files with others override it."""
    return {}


@pytest.fixture
async def store(database_url: str, store_settings: dict[str, Any]) -> AsyncIterator[StoreHandle]:
    """Yields a running store on a fresh database, which has the schema: looking for it again takes a connection."""
    async with running_store(database_url, **{"auto_migrate": False, **store_settings}) as handle:
        yield handle


@pytest.fixture
async def stubs(store: StoreHandle) -> Stubs:
    """Returns stubs of an administrator."""
    return await store.stubs()
