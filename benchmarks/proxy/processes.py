"""Processes of a run: starting them, ending them, and what they use."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import aiohttp
import psutil

from benchmarks.proxy.client import Job, Outcome

STOP_LIMIT_S = 20.0
_CPU_CLOCK_SCHED = 2


def tree(pid: int) -> list[int]:
    """Returns a process and all that descend from it."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pids: Sequence[int]) -> float:
    """Sums the CPU time of processes, user and system; those that are gone count as nothing.

    On Linux from their CPU clocks, exact to the microsecond (the clock's id is made as in clock_getcpuclockid(3));
    elsewhere from psutil, exact to about 10 ms.
    """
    total = 0.0
    for pid in pids:
        try:
            if sys.platform == "linux":
                total += time.clock_gettime((~pid << 3) | _CPU_CLOCK_SCHED)
            else:
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        except (OSError, psutil.NoSuchProcess):
            continue
    return total


def memory_mb(pids: Sequence[int]) -> float:
    """Sums the resident memory of processes, in MB; what they share counts once for each."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(
    *command: str, log: Path | None = None, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a command with pipes; ends it, and all that it started, in the end.

    Args:
        log: Where its standard error goes; with it standard output, instead of a pipe.
    """
    pipe = asyncio.subprocess.PIPE
    with (log or Path(os.devnull)).open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe if log is None else asyncio.subprocess.DEVNULL,
            stdout=pipe if log is None else sink,
            stderr=None if log is None else sink,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            limit=1024 * 1024,
        )
    try:
        yield process
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    rest = tree(process.pid)[1:]
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    for pid in rest:
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue


@asynccontextmanager
async def module(name: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs a module of this benchmark; yields it with the first line that it prints."""
    async with running(sys.executable, "-m", f"benchmarks.proxy.{name}") as process:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().strip()


class Client:
    """The load client's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, job: Job, progress: Callable[[int], None] | None = None) -> Outcome:
        """Does one job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        async with asyncio.timeout(job.limit_s + STOP_LIMIT_S):
            while line := await self._process.stdout.readline():
                said = json.loads(line)
                if "outcome" in said:
                    return Outcome(**said["outcome"])
                if progress is not None:
                    progress(said["done"])
        raise RuntimeError("the client ended")


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    """Yields a client."""
    async with module("client") as (process, _):
        yield Client(process)


async def answering(url: str, process: asyncio.subprocess.Process, limit_s: float) -> None:
    """Waits until a server of another process answers.

    Raises:
        RuntimeError: if it ends first.
        TimeoutError: if it does not answer in time.
    """
    async with asyncio.timeout(limit_s), aiohttp.ClientSession() as session:
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"it ended with status {process.returncode} before it served")
            try:
                async with session.get(url) as answer:
                    if answer.status < 500:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)  # a server of another process
