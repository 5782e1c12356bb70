"""Benchmark of idle watchers: how much of a core they cost a store.

Method: one store process over an embedded PostgreSQL. Half of the watchers watch the project's queue (`WatchQueueStats`), half the
changes of its rollouts (`WatchRolloutChanges`), each over a stream of its own; nothing happens. Processor time of the store
alone, over some seconds. Run `python -m benchmarks.idle_watchers [--watchers 200] [--seconds 20]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import queue_service_pb2, rollout_changes_pb2
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.postgres import PostgresServer
from tests.support.store.process import StoreProcess
from tests.support.store.running import SIGNING_KEY, Stubs

CHANNELS = 8


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--watchers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), given.watchers, given.seconds))


async def measure(folder: Path, watchers: int, seconds: float) -> None:
    """Prints the share of a core that a store used without watchers, and with idle ones."""
    postgres = PostgresServer()
    store = StoreProcess(postgres.fresh_database(), folder)
    try:
        target = f"127.0.0.1:{await store.port()}"
        alone = await share_of(store.process.pid, seconds)
        token = TokenSigner(SIGNING_KEY).issue(Role.READER, subject="bench", ttl_s=7200)
        async with AsyncExitStack() as stack:
            for number in range(watchers):
                if not number % (watchers // CHANNELS or 1):
                    stubs = Stubs(await stack.enter_async_context(open_channel(target, token=token)))
                stream = (
                    stubs.rollouts.WatchRolloutChanges(rollout_changes_pb2.WatchRolloutChangesRequest())
                    if number % 2
                    else stubs.queues.WatchQueueStats(queue_service_pb2.WatchQueueStatsRequest())
                )
                stack.callback(stream.cancel)
                await stream.read()
            watched = await share_of(store.process.pid, seconds)
    finally:
        store.end()
        postgres.stop()
    print(f"a store alone: {alone:.1%} of a core; with {watchers} idle watchers: {watched:.1%}")


async def share_of(pid: int, seconds: float) -> float:
    """Returns the share of a core that a process uses in some seconds."""
    began_s, began_cpu_s = time.monotonic(), cpu_s(pid)
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - began_cpu_s) / (time.monotonic() - began_s)


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
