"""A store to measure: a real process over an embedded PostgreSQL, with fsync and synchronous_commit on."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks import outcome
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_cli.local.postgres import EmbeddedPostgres
from fulmen_service_kit.security.tokens import Role, TokenSigner

START_LIMIT_S = 60.0


@dataclass(slots=True)
class Bench:
    """What is measured, and what came out."""

    channels: Sequence[FulmenChannel]
    store_pids: Sequence[int]
    postgres_folder: Path
    dsn: str
    short: bool
    targets: Sequence[str]
    days: int = 1000
    rows_per_day: int = 100
    ends: int = 0
    raw: dict[str, Any] = field(default_factory=dict)
    claims: list[outcome.Claim] = field(default_factory=list)

    def claim(self, name: str, value: float, unit: str, goal: float, better: str) -> None:
        """Records one claim."""
        self.claims.append(outcome.claim(name, value, unit, goal=goal, better=better))

    @property
    def channel(self) -> FulmenChannel:
        """The channel to the first replica."""
        return self.channels[0]

    @property
    def target(self) -> str:
        """Where the first replica listens."""
        return self.targets[0]

    def store_rss_mb(self) -> float:
        """Returns the resident memory of the largest replica, in MB."""
        return max(map(rss_mb, self.store_pids))


def cpu_seconds(pids: Sequence[int]) -> float:
    """Sums the CPU time of processes, user and system; those that are gone count as nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it may also end between opening and reading
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def postgres_cpu_seconds(folder: Path) -> float:
    """Sums the CPU time of a server, with that of its processes that ended."""
    postmaster, *children = postgres_pids(folder)
    fields = Path(f"/proc/{postmaster}/stat").read_text().rpartition(")")[2].split()
    reaped = int(fields[13]) + int(fields[14])
    return cpu_seconds([postmaster, *children]) + reaped / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Returns the resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def postgres_pids(folder: Path) -> list[int]:
    """Returns the postmaster and its children."""
    postmaster = int((folder / "postmaster.pid").read_text().split()[0])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return [postmaster, *map(int, children)]


async def wal_bytes(dsn: str) -> int:
    """Returns how much WAL PostgreSQL has written since it was made."""
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))
    finally:
        await connection.close()


async def measured(bench: Bench, name: str, work: Callable[[], Awaitable[int]]) -> tuple[int, float]:
    """Runs work and records the CPU of store, PostgreSQL and this process, and the WAL, per operation."""
    folder, wal = bench.postgres_folder, await wal_bytes(bench.dsn)
    before = (cpu_seconds(bench.store_pids), postgres_cpu_seconds(folder), time.process_time())
    started = time.perf_counter()
    operations = await work()
    seconds = time.perf_counter() - started
    after = (cpu_seconds(bench.store_pids), postgres_cpu_seconds(folder), time.process_time())
    parts = zip(("store", "postgres", "generator"), before, after, strict=True)
    cpu = {f"{part}_us": round((end - start) / operations * 1e6, 1) for part, start, end in parts}
    bench.raw[name] = {
        "operations": operations,
        "seconds": round(seconds, 3),
        "cpu_per_operation": cpu,
        "wal_bytes_per_operation": round((await wal_bytes(bench.dsn) - wal) / operations),
    }
    return operations, seconds


@asynccontextmanager
async def running_store(
    folder: Path, *, short: bool, replicas: int = 1, signing_key: str | None = None
) -> AsyncIterator[Bench]:
    """Starts PostgreSQL and replicas of the store, and stops all in the end."""
    async with (
        running_postgres(folder) as dsn,
        serving(dsn, folder, replicas=replicas, signing_key=signing_key) as served,
    ):
        yield Bench(
            channels=served.channels,
            store_pids=served.pids,
            postgres_folder=folder / "data",
            dsn=dsn,
            short=short,
            targets=served.targets,
        )


@asynccontextmanager
async def running_postgres(folder: Path) -> AsyncIterator[str]:
    """Starts PostgreSQL in the folder's `data`, and stops it in the end; yields its connection URL."""
    postgres = EmbeddedPostgres(folder / "data", settings={"shared_buffers": "512MB", "max_wal_size": "8GB"})
    try:
        yield postgres.start()
    finally:
        postgres.stop()


@dataclass(slots=True)
class Served:
    """Replicas of the store that serve."""

    token: str
    channels: list[FulmenChannel] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)


@asynccontextmanager
async def serving(
    dsn: str, folder: Path, *, replicas: int = 1, signing_key: str | None = None
) -> AsyncIterator[Served]:
    """Starts replicas of the store on a database, and stops them in the end."""
    key = signing_key or secrets.token_urlsafe(32)
    served = Served(token=TokenSigner(key).issue(Role.ADMIN, subject="bench", ttl_s=7200))
    stores: list[asyncio.subprocess.Process] = []
    try:
        async with AsyncExitStack() as stack:
            for number in range(replicas):
                ready = folder / f"ready-{number}.json"
                ready.unlink(missing_ok=True)
                stores.append(await _start(dsn, key, ready))
                served.pids.append(stores[-1].pid)
                served.targets.append(f"127.0.0.1:{await _port(stores[-1], ready)}")
                channel = open_channel(served.targets[-1], token=served.token)
                served.channels.append(await stack.enter_async_context(channel))
            yield served
    finally:
        for store in stores:
            if store.returncode is None:
                store.terminate()
                await store.wait()


async def _start(dsn: str, key: str, ready: Path) -> asyncio.subprocess.Process:
    environment = os.environ | {
        "FULMEN_STORE_DATABASE_URL": dsn,
        "FULMEN_STORE_PORT": "0",
        "FULMEN_STORE_METRICS_PORT": "0",
        "FULMEN_STORE_HTTP_PORT": "0",
        "FULMEN_STORE_SIGNING_KEY": key,
        "FULMEN_STORE_READY_FILE": str(ready),
        "FULMEN_STORE_LOG_LEVEL": "warning",
    }
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "fulmen_store", "serve", env=environment)


async def _port(store: asyncio.subprocess.Process, ready: Path) -> int:
    async with asyncio.timeout(START_LIMIT_S):
        while not ready.exists():  # a file of another process
            if store.returncode is not None:
                raise SystemExit("the store ended before it served: see its log above")
            await asyncio.sleep(0.05)
    return int(json.loads(ready.read_text())["port"])
