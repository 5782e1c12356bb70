"""The peers, in the same run: Agent Lightning 0.3.0's HTTP store from PyPI, and plain asyncpg without a service."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg

from benchmarks.store.stand import START_LIMIT_S, Bench, cpu_seconds

# The last version with a store for spans. It sets no upper bound on OpenTelemetry, and today's breaks it.
PEER = ("agentlightning==0.3.0", "opentelemetry-api==1.39.1", "opentelemetry-sdk==1.39.1", "opentelemetry-exporter-otlp==1.39.1")  # fmt: skip
HOME = Path(__file__).parents[2] / ".peers" / "agent-lightning-0.3.0"
# It asks the network for a price list when it is imported; the list that it ships will do.
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
RUNNERS = 8
CONNECTIONS = 32
LIFE = "durable rollout cycles with ten 1 kB spans each"

PLAIN = """
create table plain_job (id bigint generated always as identity primary key, state smallint not null default 0,
    input bytea not null, result bytea);
create index plain_job_ready on plain_job (id) where state = 0;
"""


def installed_peer() -> Path:
    """Returns the peer's own Python; installs it the first time."""
    python = HOME / "bin" / "python"
    if not (HOME / "complete").exists():
        shutil.rmtree(HOME, ignore_errors=True)
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "-q", "--python", "3.11", str(HOME)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *PEER], check=True)
        (HOME / "complete").touch()
    return python


@asynccontextmanager
async def running_lightning() -> AsyncIterator[tuple[str, int]]:
    """Starts its store server, and stops it in the end; yields its URL and its process id."""
    python = await asyncio.to_thread(installed_peer)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = await asyncio.create_subprocess_exec(
        str(python.with_name("agl")), "store", "--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR",
        env=os.environ | ENVIRONMENT, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await _answering(url)
        yield url, server.pid
    finally:
        server.terminate()
        await server.wait()


async def agent_lightning(bench: Bench, *, seconds: float, repeats: int) -> dict[str, tuple[float, float]]:
    """Measures its store; returns by mode the lives per second and the server's CPU seconds per life."""
    results: dict[str, tuple[float, float]] = {}
    async with running_lightning() as (url, pid):
        for mode in ("sdk", "otlp"):
            rates, costs = [], []
            for _ in range(repeats):
                before = cpu_seconds([pid])
                client = await asyncio.create_subprocess_exec(
                    str(HOME / "bin" / "python"), str(Path(__file__).with_name("agent_lightning.py")), url, mode,
                    str(RUNNERS), str(seconds), env=os.environ | ENVIRONMENT, stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                output, _ = await client.communicate()
                life = json.loads(output.splitlines()[-1])
                rates.append(life["finished"] / life["seconds"])
                costs.append((cpu_seconds([pid]) - before) / life["finished"])
            results[mode] = (statistics.median(rates), statistics.median(costs))
            bench.raw[f"Agent Lightning 0.3.0, {mode}"] = {
                "rates": [round(rate, 1) for rate in rates],
                "server_cpu_us_per_rollout": round(results[mode][1] * 1e6),
                "durable": False,
            }
    return results


async def _answering(url: str) -> None:
    async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/v1/agl/health") as answer:
                    if answer.status < 500:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)  # a server of another process


async def plain_asyncpg(bench: Bench, seconds: float) -> int:
    """Runs enqueue, SKIP LOCKED claim and completion as three commits each; returns how many cycles ended."""
    pool = await asyncpg.create_pool(bench.dsn, min_size=CONNECTIONS, max_size=CONNECTIONS)
    deadline, finished = time.perf_counter() + seconds, 0

    async def work() -> None:
        nonlocal finished
        async with pool.acquire() as connection:
            while time.perf_counter() < deadline:
                await connection.execute("insert into plain_job (input) values ($1)", b"x" * 340)
                claimed = await connection.fetchval(
                    "update plain_job set state = 1 where id = (select id from plain_job where state = 0 order by id"
                    " limit 1 for update skip locked) returning id"
                )
                await connection.execute("update plain_job set state = 2, result = $2 where id = $1", claimed, b"1")
                finished += 1

    await pool.execute(PLAIN)
    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    await pool.execute("drop table plain_job")
    await pool.close()
    return finished


async def run(bench: Bench) -> None:
    """Measures the peers and compares; the store's own figures must be there already."""
    seconds, repeats = (3.0, 1) if bench.short else (10.0, 3)
    started = time.perf_counter()
    count = await plain_asyncpg(bench, seconds)
    rate = count / (time.perf_counter() - started)
    bench.raw["plain asyncpg, 32 connections"] = {"operations": count, "rates": [round(rate, 1)]}
    own: dict[str, Any] = bench.raw[LIFE]
    rate = statistics.median(own["rates"])
    cost = (own["cpu_per_operation"]["store_us"] + own["cpu_per_operation"]["postgres_us"]) / 1e6
    peers = await agent_lightning(bench, seconds=seconds, repeats=repeats)
    for mode, title, goal in (("sdk", "its SDK", 100), ("otlp", "its best mode, one OTLP batch", 20)):
        bench.claim(f"with ten spans, times as fast as Agent Lightning 0.3.0, {title}", rate / peers[mode][0], "x", goal, "higher")  # fmt: skip
        bench.claim(f"with ten spans, server CPU per rollout of Agent Lightning 0.3.0, {title}, by ours", peers[mode][1] / cost, "x", goal, "higher")  # fmt: skip
