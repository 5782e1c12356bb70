"""A store, a backend and a proxy that routes to it, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.llm_proxy.vendor_world import VendorWorld, vendor_world


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
    async with running_proxy(store.target, backend_url=backend.url) as running:
        yield running


@pytest.fixture
async def world(store: FakeStore, backend: Backend) -> AsyncIterator[VendorWorld]:
    """Yields a proxy before both vendors and an engine."""
    async with vendor_world(store, backend) as running:
        yield running
