"""Chancy: a worker claims as many jobs as it has room for, and ends what it finished at intervals."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from chancy import Chancy, Queue, Worker, job

from benchmarks.store.peers.child import Done, Enqueue
from benchmarks.store.peers.load import INPUT, Settings

_done: list[Done] = []


@job(queue="bench")
async def bench(**_: object) -> None:
    """Is found by its import path."""
    _done[0](1)


def _chancy(dsn: str, pool: int) -> Chancy:
    log = logging.getLogger("chancy-bench")
    log.setLevel(logging.ERROR)
    return Chancy(dsn, min_connection_pool_size=pool, max_connection_pool_size=pool, log=log)


async def install(dsn: str) -> None:
    """Makes its tables."""
    async with _chancy(dsn, 1) as chancy:
        await chancy.migrate()


@contextlib.asynccontextmanager
async def running(dsn: str, settings: Settings, done: Done) -> AsyncIterator[Enqueue]:
    """Runs a worker with the executor for asynchronous jobs; it looks for jobs whenever one ends."""
    _done[:] = [done]
    async with _chancy(dsn, settings["pool"]) as chancy:
        queue = Queue("bench", concurrency=settings["concurrency"], executor=Chancy.Executor.Async, eager_polling=True)
        await chancy.declare(queue, upsert=True)
        one = bench.job.with_kwargs(**INPUT)

        async def enqueue(count: int) -> None:
            if count == 1:
                await chancy.push(one)
            else:
                async for _ in chancy.push_many([one] * count):
                    pass

        worker = Worker(chancy, register_signal_handlers=False)
        worker.send_outgoing_interval = settings["outgoing_s"]
        async with worker:
            yield enqueue
