"""A backlog of a million waiting rollouts: do claims stay as quick as they were, also under a held snapshot?

A steady churn creates and completes rollouts on top of the backlog; each minute gives the median time from demand to
assignment of 64 rollouts, and PostgreSQL's CPU per rollout. For a fifth of the time a REPEATABLE READ snapshot is held
open, which keeps PostgreSQL from clearing up what is dead.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import asyncpg

from benchmarks.store.rollouts import INPUT, complete, open_stream
from benchmarks.store.stand import Bench, cpu_seconds, postgres_pids
from fulmen.store.v1 import lease_service_pb2, rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc

BATCH = 64
CYCLES_PER_S = 20
FILL_REQUEST = 500


async def fill(bench: Bench, count: int) -> None:
    """Creates waiting rollouts."""
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    left = iter(range(0, count, FILL_REQUEST))

    async def produce() -> None:
        for _ in left:
            rollouts = [rollout_pb2.Rollout(input=INPUT) for _ in range(FILL_REQUEST)]
            await stub.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts))

    await asyncio.gather(*(produce() for _ in range(4)))


async def churn(bench: Bench, *, seconds: float, period_s: float) -> list[dict[str, float]]:
    """Claims, completes and creates at a steady pace; returns the figures of each period."""
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    stream = await open_stream(bench.channel, credit_count=0)
    pids = postgres_pids(bench.postgres_folder)
    started, periods = time.perf_counter(), []
    request = lease_service_pb2.StreamLeasesRequest
    while time.perf_counter() < started + seconds:
        period_end, latencies = time.perf_counter() + period_s, []
        cpu = cpu_seconds(pids)
        while (cycle_start := time.perf_counter()) < period_end:
            await stream.write(request(add_credits=lease_service_pb2.AddCredits(credit_count=BATCH)))
            assignments: list[Any] = []
            while len(assignments) < BATCH:
                assignments += (await stream.read()).assign.assignments
            latencies.append((time.perf_counter() - cycle_start) * 1000)
            await complete(stream, assignments, credit_count=0)
            acked = 0
            while acked < BATCH:
                acked += len((await stream.read()).ack.acks)
            rollouts = [rollout_pb2.Rollout(input=INPUT) for _ in range(BATCH)]
            await stub.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts))
            await asyncio.sleep(max(0.0, cycle_start + 1 / CYCLES_PER_S - time.perf_counter()))  # the pace
        cost = (cpu_seconds(pids) - cpu) / (len(latencies) * BATCH)
        periods.append(
            {
                "at_s": round(time.perf_counter() - started),
                "claim_p50_ms": round(statistics.median(latencies), 2),
                "claim_max_ms": round(max(latencies), 1),
                "postgres_us_per_rollout": round(cost * 1e6, 1),
                "store_rss_mb": round(bench.store_rss_mb()),
            }
        )
    stream.cancel()
    return periods


async def hold_snapshot(dsn: str, *, after_s: float, for_s: float) -> None:
    """Holds a snapshot of the whole database open for a while, as a dump or a report would."""
    await asyncio.sleep(after_s)
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.fetchval("select count(*) from project")
            await asyncio.sleep(for_s)
    finally:
        await connection.close()


async def run(bench: Bench) -> None:
    """Fills the queue, churns, and claims what came out."""
    count, seconds, period_s = (100_000, 30.0, 5.0) if bench.short else (1_000_000, 600.0, 60.0)
    started = time.perf_counter()
    await fill(bench, count)
    bench.raw["backlog"] = {"rollouts": count, "fill_s": round(time.perf_counter() - started, 1)}
    periods, _ = await asyncio.gather(
        churn(bench, seconds=seconds, period_s=period_s),
        hold_snapshot(bench.dsn, after_s=seconds * 0.4, for_s=seconds * 0.2),
    )
    bench.raw["backlog"] |= {"periods": periods, "snapshot_s": [seconds * 0.4, seconds * 0.6]}
    medians = [period["claim_p50_ms"] for period in periods]
    costs = [period["postgres_us_per_rollout"] for period in periods]
    title = f"backlog of {count:,}, {seconds:.0f} s of churn"
    middle = statistics.median(medians)
    bench.claim(f"{title}: furthest claim p50 of a period from the median", 100 * max(abs(one / middle - 1) for one in medians), "%", 20, "lower")  # fmt: skip
    bench.claim(f"{title}: claim p50 (64 rollouts), last period", medians[-1], "ms", 50, "lower")
    bench.claim(f"{title}: PostgreSQL CPU per rollout, last period by first", costs[-1] / costs[0], "x", 1.2, "lower")
    bench.claim(f"{title}: memory of the replica", max(period["store_rss_mb"] for period in periods), "MB", 400, "lower")  # fmt: skip
