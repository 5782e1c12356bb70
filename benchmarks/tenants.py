"""Benchmark of fairness: how much one project's flood slows another's calls down, with limits of projects and without.

Method: one store process over an embedded PostgreSQL; a process of project a makes calls of four kinds, 64 at a time and
each again at once, refused or not; this process makes one call of project b every 10 ms and measures it. Also the cost of
the limits per rpc. The machine's cores are shared by all of them. Run `python -m benchmarks.tenants [--seconds 10]`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulmen.errors import FulmenError
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import project_service_pb2, rollout_pb2, rollout_service_pb2
from fulmen_service_kit.security.project_limits import ProjectLimits
from fulmen_service_kit.security.tokens import Caller, Role, TokenSigner
from tests.support.postgres import PostgresServer
from tests.support.store.process import StoreProcess
from tests.support.store.running import SIGNING_KEY, Stubs

FLOODER, OTHER = "projects/a", "projects/b"
IN_FLIGHT = 64
EVERY_S = 0.01
COST_CALLS = 200_000
UNLIMITED = {f"FULMEN_STORE_PROJECT_{name}": "0" for name in ("CALLS_PER_S", "MAX_CALLS", "MAX_STREAMS")}
CASES: dict[str, dict[str, str]] = {
    "without limits": UNLIMITED,
    "with the defaults": {},
    "with 200 calls per second, 16 at a time": {
        "FULMEN_STORE_PROJECT_CALLS_PER_S": "200",
        "FULMEN_STORE_PROJECT_BURST": "200",
        "FULMEN_STORE_PROJECT_MAX_CALLS": "16",
    },
}


def token(project: str) -> str:
    """Returns a client's token of a project."""
    return TokenSigner(SIGNING_KEY).issue(Role.CLIENT, subject="bench", ttl_s=7200, project=project)


def flood(port: int, counts: Any, stop: Any) -> None:
    """Floods until stopped; counts served and refused calls."""
    asyncio.run(_flood(port, counts, stop))


async def _flood(port: int, counts: Any, stop: Any) -> None:
    async with open_channel(f"127.0.0.1:{port}", token=token(FLOODER)) as channel:
        stubs, pb = Stubs(channel), rollout_service_pb2
        batch = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(input=b"x" * 1024) for _ in range(32)])
        calls: list[Callable[[], Any]] = [
            lambda: stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(page_size=200)),
            lambda: stubs.rollouts.ListRollouts(pb.ListRolloutsRequest(filter='state = "FAILED"')),
            lambda: stubs.rollouts.GetQueueStats(pb.GetQueueStatsRequest()),
            lambda: stubs.rollouts.BatchCreateRollouts(batch),
        ]

        async def work(number: int) -> None:
            while not stop.is_set():
                try:
                    await calls[number % len(calls)]()
                    counts[0] += 1
                except FulmenError:
                    counts[1] += 1

        await asyncio.gather(*(work(number) for number in range(IN_FLIGHT)))


async def measured(port: int, seconds: float) -> list[float]:
    """Returns the durations of the other project's calls, sorted, seconds."""
    took: list[float] = []
    async with open_channel(f"127.0.0.1:{port}", token=token(OTHER)) as channel:
        stub, request = Stubs(channel).rollouts, rollout_service_pb2.ListRolloutsRequest()
        end_s = time.perf_counter() + seconds
        while (begun_s := time.perf_counter()) < end_s:
            await stub.ListRollouts(request)
            took.append(time.perf_counter() - begun_s)
            await asyncio.sleep(max(0.0, EVERY_S - took[-1]))
    return sorted(took)


async def case(name: str, settings: dict[str, str], dsn: str, folder: Path, seconds: float) -> None:
    """Measures one store, without a flood and with one."""
    store = StoreProcess(dsn, folder, **settings)
    try:
        port = await store.port()
        admin = TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="bench", ttl_s=7200)
        async with open_channel(f"127.0.0.1:{port}", token=admin) as channel:
            for project in (FLOODER, OTHER):
                made = project_service_pb2.Project(name=project)
                await Stubs(channel).projects.CreateProject(project_service_pb2.CreateProjectRequest(project=made))
        show(f"{name}, alone", await measured(port, seconds), seconds)
        context = multiprocessing.get_context("spawn")
        counts, stop = context.Array("q", 2), context.Event()
        flooder = context.Process(target=flood, args=(port, counts, stop))
        flooder.start()
        while not sum(counts):  # state of another process
            await asyncio.sleep(0.05)
        before = list(counts)
        took = await measured(port, seconds)
        served, refused = ((now - then) / seconds for now, then in zip(counts, before, strict=True))
        show(f"{name}, flooded ({served:.0f} served, {refused:.0f} refused per second)", took, seconds)
        stop.set()
        await asyncio.to_thread(flooder.join)
    finally:
        store.end()


def show(name: str, took: list[float], seconds: float) -> None:
    """Prints a line of the table."""
    p50, p95 = statistics.median(took) * 1e3, took[int(len(took) * 0.95)] * 1e3
    print(f"{name}: {len(took) / seconds:.0f} calls/s, p50 {p50:.1f} ms, p95 {p95:.1f} ms", flush=True)


async def cost() -> None:
    """Prints what the limits cost an rpc: counting the call, its bytes and its end."""
    limits = ProjectLimits(calls_per_s=1e9, burst=1e9, max_calls=512, max_streams=512)
    for what, project in (("of a project", OTHER), ("for all projects", "projects/*")):
        caller, runs = Caller(role=Role.CLIENT, project=project), []
        for _ in range(5):
            begun_s = time.process_time()
            for _ in range(COST_CALLS):
                share = await limits.admit(caller)
                share.charge(100)
                share.charge(100)
                share.end()
            runs.append((time.process_time() - begun_s) / COST_CALLS * 1e6)
        print(f"cost of the limits for a token {what}: {min(runs):.2f} µs of CPU per rpc")


async def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    seconds = parser.parse_args().seconds
    await cost()
    postgres = PostgresServer(embedded=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, settings in CASES.items():
                dsn = await asyncio.to_thread(postgres.fresh_database)
                await case(name, settings, dsn, Path(folder), seconds)
    finally:
        postgres.stop()


if __name__ == "__main__":
    asyncio.run(main())
