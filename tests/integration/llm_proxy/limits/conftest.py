"""Two proxies on one store, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.llm_proxy.limits_world import World, limits_world


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    """Yields the world of these tests."""
    async with limits_world(database_url) as running:
        yield running
