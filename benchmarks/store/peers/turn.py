"""One turn of one queue: its processes, from the first job that is enqueued until the last one is acknowledged, and their CPU."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.store.peers import lightning
from benchmarks.store.peers.catalogue import HOME, OURS, Peer
from benchmarks.store.peers.load import INPUT, MAX_AHEAD, Load, Settings
from benchmarks.store.stand import cpu_seconds, postgres_cpu_seconds, serving

ROOT = Path(__file__).parents[3]
POLL_S = 0.02
TURN_LIMIT_S = 120.0


class PeerError(Exception):
    """Raised when a queue does not do its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a turn took. CPU is in seconds: of the processes that enqueue and work, of a server before the database, of PostgreSQL."""

    jobs: int
    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    postgres_cpu_s: float
    others_cores: float
    """How many cores other work on the machine took meanwhile."""

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds

    @property
    def per_cpu_second(self) -> float:
        """Jobs per second of CPU, all processes together."""
        return self.jobs / (self.client_cpu_s + self.server_cpu_s + self.postgres_cpu_s)


@dataclass(slots=True)
class Place:
    """Where turns take place: one PostgreSQL for all of them, in the folder's `data`."""

    folder: Path
    dsn: str

    def dsn_of(self, database: str) -> str:
        """Returns the connection URL of a database."""
        return self.dsn.replace("/postgres?", f"/{database}?")

    async def execute(self, *statements: str) -> None:
        """Runs statements in the maintenance database."""
        connection = await asyncpg.connect(self.dsn)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    async def install(self, peer: Peer) -> None:
        """Makes the template of the queue's databases. The store makes its tables itself, when it starts."""
        if peer.unfinished is None or peer.module == OURS:
            return
        template = _template(peer)
        await self.execute(f'create database "{template}"')
        process = await _process(peer.command("install", self.dsn_of(template)))
        output, _ = await asyncio.wait_for(process.communicate(), TURN_LIMIT_S)
        if process.returncode:
            raise PeerError(f"The tables of {peer.title} could not be made: {output.decode()[-2000:]}")

    @asynccontextmanager
    async def database(self, peer: Peer) -> AsyncIterator[str]:
        """Makes a database for one turn, and drops it in the end; yields its connection URL."""
        template = "template1" if peer.module == OURS or peer.unfinished is None else _template(peer)
        await self.execute(f'create database turn template "{template}"', "checkpoint")
        try:
            yield self.dsn_of("turn")
        finally:
            await self.execute("drop database turn with (force)")


def _template(peer: Peer) -> str:
    return f"template_{peer.package}"


async def _process(command: Sequence[str]) -> asyncio.subprocess.Process:
    environment = os.environ | lightning.ENVIRONMENT | {"PEERS_HOME": str(HOME)}
    if command[0] == str(HOME / "bin" / "python"):
        environment["PYTHONPATH"] = str(ROOT)
    return await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


class _Child:
    """One process of a queue that is spoken to in lines."""

    def __init__(self, process: asyncio.subprocess.Process, title: str) -> None:
        self.process, self.title = process, title

    async def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise PeerError(f"A process of {self.title} ended before its turn did: see its log above.")
        return json.loads(line)


@asynccontextmanager
async def _child(command: Sequence[str], title: str) -> AsyncIterator[_Child]:
    """Starts a process, and ends it."""
    child = _Child(await _process(command), title)
    try:
        yield child
        await child.say("stop")
        await child.process.wait()
    finally:
        if child.process.returncode is None:
            child.process.kill()
            await child.process.wait()


@asynccontextmanager
async def _serving(place: Place, peer: Peer, dsn: str) -> AsyncIterator[tuple[str, Settings, list[int]]]:
    """Starts the server that a queue has before the database; yields the address for clients, more settings, its process ids."""
    if peer.module == OURS:
        async with serving(dsn, place.folder) as served:
            yield served.targets[0], {"token": served.token}, served.pids
    elif peer.unfinished is None:
        async with lightning.running_lightning() as (url, pid):
            yield url, {}, [pid]
    else:
        yield dsn, {}, []


async def take(place: Place, peer: Peer, load: Load, settings: Settings) -> Turn:
    """Runs one turn in a new database.

    Raises:
        PeerError: if a process ends early, or the jobs that were acknowledged are not those that were enqueued.
    """
    async with (
        asyncio.timeout(TURN_LIMIT_S),
        place.database(peer) as dsn,
        _serving(place, peer, dsn) as (address, more, servers),
    ):
        known = settings | more | {"max_ahead": MAX_AHEAD, "input": INPUT}
        command = [*peer.command("run", address), json.dumps(asdict(load)), json.dumps(known)]
        async with AsyncExitStack() as stack:
            started = [_child(command, peer.title) for _ in range(settings.get("processes", 1))]
            children = [await stack.enter_async_context(child) for child in started]
            for child in children:
                await child.hear()
            meter = Meter(place, [child.process.pid for child in children], servers)
            for child in children:
                await child.say("go")
            created = sum([await child.hear() for child in children])
            await _finished(peer, dsn, children, created)
            turn = meter.turn(created)
            if (finished := await _count(children)) != created:
                raise PeerError(f"{peer.title}: {created} jobs were enqueued and {finished} done.")
            return turn


async def _count(children: Sequence[_Child]) -> int:
    for child in children:
        await child.say("count")
    return sum([int(await child.hear()) for child in children])


async def _finished(peer: Peer, dsn: str, children: Sequence[_Child], created: int) -> None:
    """Waits until the database has no unfinished job, and the processes know of all that they are done."""
    if peer.unfinished is not None:
        connection = await asyncpg.connect(dsn)
        try:
            while await connection.fetchval(peer.unfinished):
                await asyncio.sleep(POLL_S)  # a row of another process
        finally:
            await connection.close()
    while await _count(children) < created:
        await asyncio.sleep(POLL_S)  # another process


class Meter:
    """Reads clocks when it is made and again at the end of the turn."""

    def __init__(self, place: Place, clients: Sequence[int], servers: Sequence[int]) -> None:
        """Starts to measure."""
        self._place, self._clients, self._servers = place, clients, servers
        self._before = self._read()

    def _read(self) -> tuple[float, ...]:
        ours = (
            cpu_seconds(self._clients),
            cpu_seconds(self._servers),
            postgres_cpu_seconds(self._place.folder / "data"),
        )
        return (time.perf_counter(), *ours, machine_cpu_seconds() - sum(ours) - time.process_time())

    def turn(self, jobs: int) -> Turn:
        """Returns what was measured."""
        seconds, client, server, postgres, others = (
            after - before for after, before in zip(self._read(), self._before, strict=True)
        )
        return Turn(
            jobs=jobs,
            seconds=seconds,
            client_cpu_s=client,
            server_cpu_s=server,
            postgres_cpu_s=postgres,
            others_cores=max(0.0, others / seconds),
        )


def machine_cpu_seconds() -> float:
    """Returns the CPU time that the whole machine has spent on processes."""
    user, nice, system, _idle, _waiting, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + sum(interrupts[:2])) / os.sysconf("SC_CLK_TCK")
