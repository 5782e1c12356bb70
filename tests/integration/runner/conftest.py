"""Fixtures: a runner process between the doubles of the store and the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.runner.fixtures import proxy, publish_agent, start_runner
from tests.support.runner.harness import SIGNING_KEY
from tests.support.runner.store_double import StoreDouble
from tests.support.runner.stores import LEASE_TTL_S, DoubleStore

__all__ = ["proxy", "publish_agent", "start_runner", "store"]


@pytest_asyncio.fixture
async def store() -> AsyncIterator[DoubleStore]:
    """Yields the double of the store."""
    double = StoreDouble(signing_key=SIGNING_KEY, lease_ttl_s=LEASE_TTL_S)
    await double.start()
    yield DoubleStore(double)
    await double.close()
