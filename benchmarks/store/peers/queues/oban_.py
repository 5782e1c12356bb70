"""Oban for Python: a producer claims a batch of jobs, and ends what they finished together before it claims more."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from oban import Oban, worker
from oban.schema import install as install_schema

from benchmarks.store.peers.child import Done, Enqueue
from benchmarks.store.peers.load import INPUT, Settings

_done: list[Done] = []


@worker(queue="bench")
class Bench:
    """Is found by its import path."""

    async def process(self, _: object) -> None:
        """Does one job."""
        _done[0](1)


async def install(dsn: str) -> None:
    """Makes its tables."""
    pool = await Oban.create_pool(dsn)
    await install_schema(pool)
    await pool.close()


@contextlib.asynccontextmanager
async def running(dsn: str, settings: Settings, done: Done) -> AsyncIterator[Enqueue]:
    """Runs one queue; many jobs are enqueued by its call for many."""
    _done[:] = [done]
    pool = await Oban.create_pool(dsn, min_size=settings["pool"], max_size=settings["pool"])
    async with Oban(pool=pool, queues={"bench": settings["concurrency"]}) as oban:

        async def enqueue(count: int) -> None:
            await oban.enqueue_many([Bench.new(INPUT) for _ in range(count)])  # type: ignore[attr-defined]  # by a decorator

        yield enqueue
    await pool.close()
