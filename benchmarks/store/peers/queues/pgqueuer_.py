"""PgQueuer: a worker claims a batch of jobs, and ends what it finished in batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.store.peers.child import Done, Enqueue
from benchmarks.store.peers.load import INPUT, Settings

PAYLOAD = json.dumps(INPUT).encode()


async def install(dsn: str) -> None:
    """Makes its tables."""
    connection = await asyncpg.connect(dsn)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


@contextlib.asynccontextmanager
async def running(dsn: str, settings: Settings, done: Done) -> AsyncIterator[Enqueue]:
    """Runs a worker on a connection of its own; producers share a pool."""
    size = settings["pool"]
    async with asyncpg.create_pool(dsn, min_size=size, max_size=size) as pool:
        queries, worker = Queries(AsyncpgPoolDriver(pool)), PgQueuer(AsyncpgDriver(await asyncpg.connect(dsn)))

        @worker.entrypoint("bench")
        async def bench(job: Job) -> None:
            done(1)

        async def enqueue(count: int) -> None:
            if count == 1:
                await queries.enqueue("bench", PAYLOAD)
            else:
                await queries.enqueue(["bench"] * count, [PAYLOAD] * count, [0] * count)

        task = asyncio.create_task(worker.run(batch_size=settings["batch"]))
        yield enqueue
        worker.shutdown.set()
        await asyncio.gather(task, return_exceptions=True)
