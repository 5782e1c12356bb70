"""How many attempts one runner holds at once, and in how much memory: agents that wait for a slow model.

The model counts the calls that it answers at once, so that the number of concurrent attempts is seen from outside.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from benchmarks.proxy.processes import answering, free_port, running
from benchmarks.runner.agents import CALLS
from benchmarks.runner.stand import START_LIMIT_S, Bench, running_runner

SLOTS = 200
MODEL_S = 2.0
LIMIT_S = 180.0
GOAL_MB = 400
KINDS = {"async": "waits_for_its_model", "blocking": "waits_in_a_thread"}


@asynccontextmanager
async def slow_model(seconds: float) -> AsyncIterator[str]:
    """Runs the model; yields its base URL."""
    port = free_port()
    command = (sys.executable, "-m", "benchmarks.runner.model", str(port), str(seconds))
    async with running(*command) as process:
        await answering(f"http://127.0.0.1:{port}/most", process, START_LIMIT_S)
        yield f"http://127.0.0.1:{port}"


async def run(bench: Bench) -> None:
    """Measures peak memory and CPU per attempt for agents that await and agents that block."""
    count = SLOTS * (2 if bench.short else 5)
    async with slow_model(MODEL_S) as url:
        for kind, agent in KINDS.items():
            figures = await _one(bench, agent, url, count)
            bench.raw[f"{SLOTS} concurrent attempts, {kind} agent"] = figures
            bench.claim(f"peak memory of one runner with {SLOTS} concurrent attempts of {kind} agents", figures["peak_mb"], "MB", GOAL_MB, "lower")  # fmt: skip
            bench.claim(f"attempts at once, seen by the model, {kind} agents", figures["at_once"], "", SLOTS, "higher")


async def _one(bench: Bench, agent: str, url: str, count: int) -> dict[str, float]:
    await bench.create(count)
    environment = {"BENCH_MODEL_URL": f"{url}/v1", "FULMEN_RUNNER_INHERIT_ENVIRONMENT": "BENCH_MODEL_URL"}
    async with aiohttp.ClientSession() as session:
        await _most(session, url)
        async with running_runner(bench, agent=agent, slots=SLOTS, environment=environment) as runner:
            idle_mb, peak_mb = runner.memory_mb(), 0.0
            started, deadline = time.perf_counter(), time.monotonic() + LIMIT_S
            while (await runner.status()).completed_count < count:
                if time.monotonic() > deadline:
                    raise SystemExit(f"the runner has not ended {count} attempts within {LIMIT_S:g} s")
                peak_mb = max(peak_mb, runner.memory_mb())
                await asyncio.sleep(0.1)  # a count of another process
            seconds, cpu_s = time.perf_counter() - started, runner.cpu_s()
        most = await _most(session, url)
    return {
        "attempts": count,
        "at_once": most,
        "idle_mb": round(idle_mb, 1),
        "peak_mb": round(peak_mb, 1),
        "seconds": round(seconds, 1),
        # What it takes if nothing but the model took time.
        "ideal_seconds": round(count / SLOTS * CALLS * MODEL_S, 1),
        "cpu_ms_per_attempt": round(cpu_s / count * 1000, 2),
    }


async def _most(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/most") as answer:
        return int((await answer.json())["most"])
