"""Fixtures: a runner process between the doubles of the store and the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.runner.fixtures import proxy, publish_agent, start_runner, world
from tests.support.runner.store_double import StoreDouble

__all__ = ["proxy", "publish_agent", "start_runner", "store", "world"]


@pytest_asyncio.fixture
async def store() -> AsyncIterator[StoreDouble]:
    """Yields the double of the store."""
    async with StoreDouble() as double:
        yield double
