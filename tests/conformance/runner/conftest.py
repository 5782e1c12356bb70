"""Fixtures of the runner's conformance suite: every test runs against both stores."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.postgres import shared_server
from tests.support.runner.fixtures import proxy, publish_agent, start_runner
from tests.support.runner.harness import SIGNING_KEY
from tests.support.runner.store_double import StoreDouble
from tests.support.runner.stores import LEASE_TTL_S, DoubleStore, RealStore, Store

__all__ = ["proxy", "publish_agent", "start_runner", "store"]


@pytest_asyncio.fixture(params=["real", pytest.param("double", marks=pytest.mark.long(short=True))])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Yields a store that serves."""
    if request.param == "double":
        double = StoreDouble(signing_key=SIGNING_KEY, lease_ttl_s=LEASE_TTL_S)
        await double.start()
        yield DoubleStore(double)
        await double.close()
        return
    server = shared_server()
    database_url = server.fresh_database()
    real = RealStore(database_url)
    await real.start()
    yield real
    await real.close()
    server.drop(database_url)
