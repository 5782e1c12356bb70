"""The feed beside others: what a watcher costs whose training run ends nothing, while other runs of the project end very many.

A look of such a watcher, in pages of PostgreSQL, beside none and beside all ends of another run; CPU of store and PostgreSQL
while all watchers are idle, less what they take without watchers; and CPU per ended rollout of the other run beside all of them
by that beside one. Pages and ratios hold on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from operator import add
from typing import Any

import asyncpg

from benchmarks.store.rollouts import INPUT, complete, open_stream
from benchmarks.store.stand import Bench, cpu_seconds, postgres_pids
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from fulmen_store.database.connections import HOT_SETTINGS
from fulmen_store.database.queries import SQL

WATCHERS = 200
RUN = "projects/default/trainingRuns/{}"
OTHER = RUN.format("other")
BATCH = 20
ROUNDS = 5
OTHERS_ENDS = """
insert into rollout_end (rollout_id, project_id, run_id, group_size, state, failure_kind)
select uuid7_bound(now() - n * interval '1 millisecond'), t.project_id, t.id, 1, 4, 0
from generate_series(1, $1::int) n, training_run t where t.name = $2
"""
SCAN = "execute scan_run_feed (1, 0, '00000000-0000-0000-0000-000000000000', 512, {})"


async def pages_of_a_look(dsn: str, run_id: int) -> int:
    """Returns how many pages PostgreSQL reads for a look at the feed of a training run, in its first or any later call."""
    connection = await asyncpg.connect(dsn, server_settings=HOT_SETTINGS)
    try:
        await connection.execute(f"prepare scan_run_feed as {SQL['scan_run_feed']}")
        told = await connection.fetchval("explain (analyze, buffers, timing off, format json) " + SCAN.format(run_id))
        plan = json.loads(told)[0]["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    finally:
        await connection.close()


async def end_rollouts(bench: Bench, runs: Sequence[str]) -> None:
    """Creates and completes a rollout of each of these training runs, some at a time."""
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    stream = await open_stream(bench.channel, credit_count=BATCH)
    for start in range(0, len(runs), BATCH):
        rollouts = [rollout_pb2.Rollout(input=INPUT, training_run=run) for run in runs[start : start + BATCH]]
        await stub.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts))
        assignments: list[Any] = []
        while len(assignments) < len(rollouts):
            assignments += (await stream.read()).assign.assignments
        await complete(stream, assignments, credit_count=len(rollouts))
        acked = 0
        while acked < len(rollouts):
            acked += len((await stream.read()).ack.acks)
    stream.cancel()


async def cpu_of(bench: Bench, work: Callable[[], Awaitable[object]]) -> tuple[float, float, float]:
    """Returns the CPU seconds of store and PostgreSQL while work is done, and its wall time."""
    pids = postgres_pids(bench.postgres_folder)
    before, started = (cpu_seconds(bench.store_pids), cpu_seconds(pids)), time.perf_counter()
    await work()
    # A connection that has been opened since is left out in both.
    return cpu_seconds(bench.store_pids) - before[0], cpu_seconds(pids) - before[1], time.perf_counter() - started


async def run(bench: Bench) -> None:
    """Measures the looks, the idle watchers, and ends beside them."""
    ends = bench.ends or (100_000 if bench.short else 1_000_000)
    idle_s, cycled = (15.0, 6_000) if bench.short else (60.0, 30_000)
    runs = [RUN.format(number) for number in range(WATCHERS)]
    await end_rollouts(bench, [*runs, OTHER])
    connection = await asyncpg.connect(bench.dsn)
    idle_run = await connection.fetchval("select id from training_run where name = $1", runs[0])
    before = await pages_of_a_look(bench.dsn, idle_run)
    await connection.execute(OTHERS_ENDS, ends, OTHER, timeout=600)
    await connection.execute("vacuum analyze rollout_end", timeout=600)
    await connection.close()
    after = await pages_of_a_look(bench.dsn, idle_run)

    quiet = await cpu_of(bench, lambda: asyncio.sleep(idle_s))
    async with watching(bench, runs):
        idle = await cpu_of(bench, lambda: asyncio.sleep(idle_s))
    alone, beside = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    # By turns: a batch has fewer rows, which cost more each, while the machine is busy.
    for _ in range(ROUNDS):
        for watched, sums in ((runs[:1], alone), (runs, beside)):
            async with watching(bench, watched):
                figures = await cpu_of(bench, lambda: end_rollouts(bench, [OTHER] * (cycled // ROUNDS)))
            sums[:] = map(add, sums, figures)

    share = 100 * max(0.0, sum(idle[:2]) / idle[2] - sum(quiet[:2]) / quiet[2])
    ratio = sum(beside[:2]) / sum(alone[:2])
    names = ("store_s", "postgres_s", "wall_s")
    parts = {"quiet": quiet, "idle_watchers": idle, "ends_beside_one": alone, "ends_beside_all": beside}
    bench.raw["feed"] = {
        "ends_of_another_run": ends,
        "watchers": WATCHERS,
        "pages_of_a_look": {"beside none": before, "beside all": after},
        "cycled": cycled,
        **{part: dict(zip(names, map(_rounded, figures), strict=True)) for part, figures in parts.items()},
    }
    bench.claim(f"feed: pages of a look beside {ends:,} ends of another run, by those beside none", after / before, "x", 3, "lower")  # fmt: skip
    bench.claim(f"feed: CPU of {WATCHERS} idle watchers, store and PostgreSQL", share, "% of a core", 5, "lower")
    bench.claim(f"feed: CPU per ended rollout beside {WATCHERS} idle watchers, by that beside one", ratio, "x", 1.2, "lower")  # fmt: skip


@asynccontextmanager
async def watching(bench: Bench, runs: Sequence[str]) -> AsyncIterator[None]:
    """Watches training runs that have ended one rollout each."""
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    watchers = [stub.WatchRollouts(rollout_service_pb2.WatchRolloutsRequest(training_run=run)) for run in runs]
    for watcher in watchers:
        assert (await watcher.read()).groups
    reading = [asyncio.create_task(_read_all(watcher)) for watcher in watchers]
    try:
        yield
    finally:
        for task, watcher in zip(reading, watchers, strict=True):
            task.cancel()
            watcher.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _read_all(watcher: Any) -> None:
    while True:
        await watcher.read()


def _rounded(figure: float) -> float:
    return round(figure, 3)
