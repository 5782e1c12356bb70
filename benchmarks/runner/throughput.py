"""Attempts per second of an agent that does nothing, through runner and store: what Fulmen itself costs.

The rollouts are queued before. What counts is the time between two readings of the runner's own count of attempts that
ended, one after the first tenth and one before the end; the CPU is that of the same time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from benchmarks.runner.stand import Bench, Runner, running_runner

TITLE = "attempts of a trivial agent"
SLOTS = 256
LIMIT_S = 120.0
POLL_S = 0.02
GOAL_PER_S = 2000


async def run(bench: Bench) -> None:
    """Measures the rate and the CPU per attempt; medians of several runs, each with a new runner."""
    count, repeats = (4000, 1) if bench.short else (20_000, 5)
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        await bench.create(count)
        async with running_runner(bench, agent="trivial", slots=SLOTS) as runner:
            runs.append(await _one(bench, runner, count))
    bench.raw[TITLE] = {"runs": runs, "slots": SLOTS}
    rate = statistics.median(run["per_s"] for run in runs)
    bench.claim(f"{TITLE} through runner and store", rate, "1/s", GOAL_PER_S, "higher")
    cpu = {part: statistics.median(run[f"{part}_us"] for run in runs) for part in ("runner", "store", "postgres")}
    bench.raw[TITLE]["cpu_us"] = cpu
    bench.claim(f"CPU of runner, store and PostgreSQL per {TITLE.replace('attempts', 'attempt')}", sum(cpu.values()), "us", 1e6 * 2 / GOAL_PER_S, "lower")  # fmt: skip


async def _one(bench: Bench, runner: Runner, count: int) -> dict[str, float]:
    first = await reached(bench, runner, count // 10)
    last = await reached(bench, runner, count - SLOTS)
    ended = last["ended"] - first["ended"]
    figures = {"per_s": ended / (last["at_s"] - first["at_s"])}
    for part in ("runner", "store", "postgres"):
        figures[f"{part}_us"] = (last[part] - first[part]) / ended * 1e6
    await reached(bench, runner, count)
    return {name: round(value, 1) for name, value in figures.items()}


async def reached(bench: Bench, runner: Runner, count: int) -> dict[str, Any]:
    """Waits until a runner has ended a number of attempts; returns the count, the time and the CPU until then."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended = (await runner.status()).completed_count
        if ended >= count:
            return {"ended": ended, "at_s": time.perf_counter(), "runner": runner.cpu_s(), **bench.server_cpu_s()}
        await asyncio.sleep(POLL_S)  # a count of another process
    raise SystemExit(f"the runner has not ended {count} attempts within {LIMIT_S:g} s")
