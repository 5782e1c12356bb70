"""A tiny model, a store, and runs over a model of the other services."""

from collections.abc import AsyncIterator

import pytest

from tests.support.algorithm.run_service import (  # noqa: F401  (fixtures)
    grpo_draft,
    open_service,
    sft_draft,
    tiny_model,
    world,
)
from tests.support.store.running import StoreHandle, running_store


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a store on a database of its own."""
    async with running_store(database_url) as handle:
        yield handle
