"""Agent Lightning's store server: rollouts over HTTP, claimed by polling; a runner marks each attempt as succeeded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from agentlightning.store import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest

from benchmarks.store.peers.child import Done, Enqueue
from benchmarks.store.peers.load import INPUT, Settings

POLL_S = 0.01


@contextlib.asynccontextmanager
async def running(address: str, settings: Settings, done: Done) -> AsyncIterator[Enqueue]:
    """Runs runners, each of which claims up to `limit` rollouts and updates their attempts one by one."""
    store = LightningStoreClient(address)

    async def work() -> None:
        while True:
            for one in await store.dequeue_many_rollouts(limit=settings["limit"]):
                await store.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded")
                done(1)
            await asyncio.sleep(POLL_S)

    async def enqueue(count: int) -> None:
        if count == 1:
            await store.enqueue_rollout(input=INPUT)
        else:
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=INPUT)] * count)

    runners = [asyncio.create_task(work()) for _ in range(settings["runners"])]
    yield enqueue
    for task in runners:
        task.cancel()
    await asyncio.gather(*runners, return_exceptions=True)
    await store.close()
