"""Agent Lightning 0.3.0's runner in the same run: its runner processes against its own store server, as it ships them.

Its runner runs one rollout at a time in a process, so many at once are as many processes. The tracer is its lighter one
(plain OpenTelemetry), the polling interval 0.05 s instead of its 5 s.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.proxy.processes import answering, cpu_seconds, free_port, memory_mb, running, tree
from benchmarks.runner import density, throughput
from benchmarks.runner.stand import START_LIMIT_S, Bench
from benchmarks.store.peers.lightning import installed_peer

NAME = "Agent Lightning 0.3.0"
SCRIPT = Path(__file__).with_name("agent_lightning.py")
RUN_LIMIT_S = 240.0
DENSE = 4
"""How many runner processes are measured for the memory of one."""


async def run(bench: Bench) -> None:
    """Measures it, and compares; Fulmen's own figures must be there already."""
    python = await asyncio.to_thread(installed_peer)
    count = 60 if bench.short else 200
    async with _store(python) as (url, pid):
        await _throughput(bench, python, url, pid, runners=2, count=count)
        await _throughput(bench, python, url, pid, runners=8, count=count)
        async with density.slow_model(density.MODEL_S) as model:
            await _density(bench, python, url, model)
    _compare(bench)


@asynccontextmanager
async def _store(python: Path) -> AsyncIterator[tuple[str, int]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = (
        str(python.with_name("agl")),
        "store",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "ERROR",
    )
    async with running(*command, environment=_environment(), log=Path(os.devnull)) as process:
        await answering(f"{url}/v1/agl/health", process, START_LIMIT_S)
        yield url, process.pid


def _environment(**more: str) -> dict[str, str]:
    # It asks the network for a price list when it is imported; the list that it ships will do.
    return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGENTOPS_API_KEY": "", **more}


async def _throughput(bench: Bench, python: Path, url: str, store_pid: int, *, runners: int, count: int) -> None:
    await _script(python, url, 0, "enqueue", runners * count, _environment())
    before = cpu_seconds(tree(store_pid))
    results = await asyncio.gather(
        *(_script(python, url, worker, "trivial", count, _environment()) for worker in range(runners))
    )
    store_s = cpu_seconds(tree(store_pid)) - before
    # Their starts, 5 s of CPU each, are left out: from the first that is ready to the last that ends.
    seconds = max(one["ended"] for one in results) - min(one["started"] for one in results)
    bench.raw[f"{NAME}, {throughput.TITLE}, {runners} runners"] = {
        "per_s": round(runners * count / seconds, 1),
        "runner_us": round(sum(one["cpu_s"] for one in results) / runners / count * 1e6),
        "store_us": round(store_s / runners / count * 1e6),
    }


async def _density(bench: Bench, python: Path, url: str, model: str) -> None:
    await _script(python, url, 0, "enqueue", DENSE, _environment())
    environment = _environment(BENCH_MODEL_URL=f"{model}/v1")
    tasks = [
        asyncio.create_task(_script(python, url, worker, density.KINDS["async"], 1, environment))
        for worker in range(DENSE)
    ]
    peak_mb = 0.0
    while not all(task.done() for task in tasks):
        processes = [pid for pid in tree(os.getpid()) if _runs(pid, SCRIPT.name)]
        peak_mb = max([peak_mb, *(memory_mb([pid]) for pid in processes)])
        await asyncio.wait(tasks, timeout=0.2)
    for task in tasks:
        task.result()
    bench.raw[f"{NAME}, one concurrent attempt"] = {"peak_mb": round(peak_mb, 1)}


def _runs(pid: int, script: str) -> bool:
    try:
        return script.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def _script(
    python: Path, url: str, worker: int, agent: str, count: int, environment: dict[str, str]
) -> dict[str, Any]:
    arguments = (str(python), str(SCRIPT), url, str(worker), agent, str(count))
    async with running(*arguments, environment=environment) as process:
        assert process.stdout is not None
        async with asyncio.timeout(RUN_LIMIT_S):
            output = await process.stdout.read()
    lines = output.decode().splitlines()
    if not lines:
        raise RuntimeError(f"{NAME}'s runner ended without a result")
    return dict(json.loads(lines[-1]))


def _compare(bench: Bench) -> None:
    theirs = max(
        (one for name, one in bench.raw.items() if name.startswith(f"{NAME}, {throughput.TITLE}")),
        key=lambda one: one["per_s"],
    )
    if throughput.TITLE in bench.raw:
        ours = bench.raw[throughput.TITLE]
        rate = sorted(run["per_s"] for run in ours["runs"])[len(ours["runs"]) // 2]
        bench.claim(f"{throughput.TITLE}, times as many per second as {NAME} with the better of 2 and 8 runners", rate / theirs["per_s"], "x", 20, "higher")  # fmt: skip
        cpu = sum(ours["cpu_us"].values())
        bench.claim(f"{throughput.TITLE}, CPU of {NAME}'s runner and store by ours", (theirs["runner_us"] + theirs["store_us"]) / cpu, "x", 20, "higher")  # fmt: skip
    dense = bench.raw.get(f"{density.SLOTS} concurrent attempts, async agent")
    if dense is not None:
        each = dense["peak_mb"] / density.SLOTS
        peak_mb = bench.raw[f"{NAME}, one concurrent attempt"]["peak_mb"]
        bench.claim(f"memory of {NAME} per concurrent attempt by ours", peak_mb / each, "x", 100, "higher")
