"""Fixtures of the runner's conformance suite: every test runs against both stores."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.runner.fixtures import Store, proxy, publish_agent, start_runner, world
from tests.support.runner.store_double import StoreDouble
from tests.support.runner.stores import RealStore

__all__ = ["proxy", "publish_agent", "start_runner", "store", "world"]


@pytest_asyncio.fixture(params=["real", pytest.param("double", marks=pytest.mark.long(short=True))])
async def store(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[Store]:
    """Yields a store that serves."""
    async with RealStore(database_url) if request.param == "real" else StoreDouble() as running:
        yield running
