"""Several replicas of the store on one database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.support.store.running import (
    StoreHandle,
    running_store,
)

__all__ = ["meet", "replicas"]


@asynccontextmanager
async def replicas(dsn: str, count: int, **settings: Any) -> AsyncIterator[list[StoreHandle]]:
    """Runs several stores that know one another."""
    async with AsyncExitStack() as stack:
        handles = [await stack.enter_async_context(running_store(dsn, **settings)) for _ in range(count)]
        await meet(*handles)
        yield handles


async def meet(*handles: StoreHandle) -> None:
    """Lets replicas look at who lives, twice, so that the first knows the last and how many runners each has."""
    for _ in range(2):
        for handle in handles:
            await handle.parts.roles["membership-renewer"].renew_once()
