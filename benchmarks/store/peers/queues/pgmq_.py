"""pgmq, as SQL without its extension: readers read a batch of messages and delete those they are done with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncpg
from pgmq import AsyncPGMQueue
from pgmq.install import get_embedded_install_sql, install_pgmq_sql

from benchmarks.store.peers.child import Done, Enqueue
from benchmarks.store.peers.load import INPUT, Settings


async def install(dsn: str) -> None:
    """Makes its functions and one queue, which is logged and so durable."""
    await asyncio.to_thread(install_pgmq_sql, get_embedded_install_sql(), dsn=dsn)
    async with asyncpg.create_pool(dsn, min_size=1) as pool:
        await _client(pool).create_queue("bench")


def _client(pool: asyncpg.Pool) -> AsyncPGMQueue:
    return AsyncPGMQueue(pool=pool, init_extension=False)


@contextlib.asynccontextmanager
async def running(dsn: str, settings: Settings, done: Done) -> AsyncIterator[Enqueue]:
    """Runs readers; each deletes its batch after it worked on it, by one statement."""
    size = settings["pool"]
    async with asyncpg.create_pool(dsn, min_size=size, max_size=size) as pool:
        queue, stop = _client(pool), asyncio.Event()

        async def read() -> None:
            while not stop.is_set():
                messages = await queue.read_with_poll(
                    "bench", vt=30, qty=settings["batch"], max_poll_seconds=1, poll_interval_ms=5
                )
                if messages:
                    done(len(await queue.delete_batch("bench", [message.msg_id for message in messages])))

        async def enqueue(count: int) -> None:
            if count == 1:
                await queue.send("bench", INPUT)
            else:
                await queue.send_batch("bench", [INPUT] * count)

        readers = [asyncio.create_task(read()) for _ in range(settings["readers"])]
        yield enqueue
        stop.set()
        await asyncio.gather(*readers)
