"""Procrastinate: a worker claims a job by one statement and ends it by another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import procrastinate

from benchmarks.store.peers.child import Done, Enqueue
from benchmarks.store.peers.load import INPUT, Settings


def _app(dsn: str, pool: int) -> procrastinate.App:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=pool, max_size=pool))


async def install(dsn: str) -> None:
    """Makes its tables."""
    async with _app(dsn, 1).open_async() as app:
        await app.schema_manager.apply_schema_async()


@contextlib.asynccontextmanager
async def running(dsn: str, settings: Settings, done: Done) -> AsyncIterator[Enqueue]:
    """Runs a worker; many jobs are enqueued by its batch call."""
    app = _app(dsn, settings["pool"])

    @app.task(name="bench")
    async def bench(**_: object) -> None:
        done(1)

    async def enqueue(count: int) -> None:
        if count == 1:
            await bench.defer_async(**INPUT)
        else:
            await bench.batch_defer_async(*[INPUT] * count)

    async with app.open_async():
        worker = app.run_worker_async(concurrency=settings["concurrency"], install_signal_handlers=False)
        task = asyncio.create_task(worker)
        yield enqueue
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
