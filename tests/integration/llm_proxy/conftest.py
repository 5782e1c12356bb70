"""A store, a backend and a proxy that routes to it, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    """Yields a store."""
    async with FakeStore() as running:
        yield running


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    """Yields a model server."""
    async with Backend() as running:
        yield running


@pytest.fixture
async def proxy(store: FakeStore, backend: Backend) -> AsyncIterator[RunningProxy]:
    """Yields a proxy with the backend `one` and a trainable route to it, policy version 1."""
    async with running_proxy(store.target) as running:
        await running.register("one", backend.url)
        await running.put_route(target("one"))
        yield running
