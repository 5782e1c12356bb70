"""One process of a queue, in the queue's own environment: it enqueues jobs and works on them, at once.

`python -m benchmarks.store.peers.child QUEUE install ADDRESS` makes the queue's tables. `... run ADDRESS LOAD SETTINGS` writes
`ready`, waits for a line, enqueues, and writes how many it enqueued. It works on jobs all the time; to each line `count` it answers
how many it worked on, and at the line `stop` it ends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import uvloop

from benchmarks.store.peers.load import MAX_AHEAD, Load, Settings

LINE_LIMIT_S = 120.0
STOP_LIMIT_S = 10.0
WAKE_S = 0.05
Done = Callable[[int], None]
Enqueue = Callable[[int], Awaitable[Any]]


class Queue(Protocol):
    """What a module of `queues` has. An address is a URL of a database, or where a server listens."""

    def install(self, address: str) -> Awaitable[None]:
        """Makes the queue's tables."""

    def running(self, address: str, settings: Settings, done: Done) -> AbstractAsyncContextManager[Enqueue]:
        """Works on jobs and reports each to `done`; yields what enqueues so many, and returns when they are committed."""


async def produce(enqueue: Enqueue, load: Load, finished: Callable[[], int], moved: asyncio.Event) -> int:
    """Enqueues for so long, and at most `MAX_AHEAD` more than are finished; returns how many."""
    created, deadline = 0, time.perf_counter() + load.seconds
    # Another process may work on what this one enqueued.
    asyncio.get_running_loop().call_later(load.seconds + WAKE_S, moved.set)

    async def one() -> None:
        nonlocal created
        while time.perf_counter() < deadline:
            await enqueue(load.per_request)
            created += load.per_request
            while created - finished() > MAX_AHEAD and time.perf_counter() < deadline:
                moved.clear()
                await moved.wait()

    await asyncio.gather(*(one() for _ in range(load.producers)))
    return created


async def _line() -> str:
    """Waits for a line of the parent; none if the parent is gone."""
    async with asyncio.timeout(LINE_LIMIT_S):
        return (await asyncio.to_thread(sys.stdin.readline)).strip()


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def run(queue: Queue, address: str, load: Load, settings: Settings) -> None:
    """Does one turn."""
    finished, moved = 0, asyncio.Event()

    def done(count: int) -> None:
        nonlocal finished
        finished += count
        moved.set()

    async with asyncio.timeout(None) as limit, queue.running(address, settings, done) as enqueue:
        _say("ready")
        await _line()
        _say(await produce(enqueue, load, lambda: finished, moved))
        while await _line() == "count":
            _say(finished)
        limit.reschedule(asyncio.get_running_loop().time() + STOP_LIMIT_S)


def main() -> None:
    """Installs or runs one queue."""
    name, action, address, *more = sys.argv[1:]
    queue = importlib.import_module(f"benchmarks.store.peers.queues.{name}")
    if action == "install":
        uvloop.run(queue.install(address))
    else:
        load, settings = map(json.loads, more)
        uvloop.run(run(queue, address, Load(**load), settings))


if __name__ == "__main__":
    main()
