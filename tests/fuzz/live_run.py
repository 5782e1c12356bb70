"""Runs live targets over one stack: many inputs in flight, memory sampled, the slowest measured again alone."""

from __future__ import annotations

import asyncio
import heapq
import importlib
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutation import MAX_BYTES
from tests.fuzz.pure import MAX_INPUT_S, TooSlow, rss_bytes
from tests.fuzz.target import Finding, kept_inputs, signature
from tests.fuzz.world import LiveTarget, LiveWorld, live_world

__all__ = ["LiveRun", "reproduce_live", "run_live"]

_POOL = 4096
_SAMPLE_EVERY = 10_000
_SLOWEST = 12
_TICKS_PER_S = 100


class Crashed(Exception):
    """A service ended."""


@dataclass(slots=True, kw_only=True)
class LiveRun:
    """One run of a live target; see `pure.Run`."""

    name: str
    target: LiveTarget
    count: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    rss_bytes: dict[str, dict[int, int]] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    _slow: list[tuple[float, int, bytes]] = field(default_factory=list)

    def note(self, error: BaseException, data: bytes) -> None:
        """Keeps the shortest input of each kind of finding."""
        where = f"{signature(error)} {str(error)[:60]}" if "tests/fuzz" in signature(error) else signature(error)
        known = self.findings.get(where)
        if known is None or len(data) < len(known.data):
            self.findings[where] = Finding(target=self.name, where=where, what=str(error)[:300], data=data)

    def sample(self, world: LiveWorld) -> None:
        """Records the memory of the services."""
        for service in self.target.services:
            if service not in world.crashed():
                self.rss_bytes.setdefault(service, {})[self.count] = rss_bytes(world.pid(service))

    async def one(self, world: LiveWorld, data: bytes) -> None:
        """Sends one input."""
        began = time.perf_counter()
        try:
            await self.target.send(world, data)
        except Exception as error:  # noqa: BLE001  # any error is what is looked for
            self.note(error, data)
        self.count += 1
        heapq.heappush(self._slow, (time.perf_counter() - began, self.count, data))
        if len(self._slow) > _SLOWEST:
            heapq.heappop(self._slow)
        if self.count % _SAMPLE_EVERY == 0:
            self.sample(world)

    async def slowest_alone(self, world: LiveWorld) -> None:
        """Sends the slowest inputs again, one at a time, and measures the CPU time that each takes of a service."""
        for _, _, data in self._slow:
            before = {service: _cpu_s(world.pid(service)) for service in self.target.services}
            await self.one(world, data)
            took = max(_cpu_s(world.pid(service)) - before[service] for service in self.target.services)
            self.slowest_s = max(self.slowest_s, took)
            if took > MAX_INPUT_S:
                self.note(TooSlow(f"{took:.1f} s"), data)


async def run_live(names: list[str], *, seed: int, seconds: float, runs: int) -> list[LiveRun]:
    """Runs targets one after another."""
    done = []
    targets = {name: _load(name) for name in names}
    async with live_world({service for target in targets.values() for service in target.services}) as world:
        for name, target in targets.items():
            run = LiveRun(name=name, target=target)
            await _run(run, world, random.Random(f"{name} {seed}"), seconds=seconds, runs=runs)
            done.append(run)
    return done


async def reproduce_live(name: str, data: bytes) -> None:
    """Sends one input to a fresh stack; raises what it finds."""
    target = _load(name)
    async with live_world(target.services) as world:
        await target.send(world, data)
        if world.crashed():
            raise Crashed(f"{world.crashed()} ended")


async def _run(run: LiveRun, world: LiveWorld, rng: random.Random, *, seconds: float, runs: int) -> None:
    target = run.target
    seeds = [*target.seeds(world), *(path.read_bytes() for path in kept_inputs(run.name))]
    pool = list(seeds)
    began = time.monotonic()
    waiting = list(reversed(seeds))

    def next_input() -> bytes:
        if waiting:
            return waiting.pop()
        data = target.mutate(world, rng.choice(seeds if rng.random() < 0.5 else pool), rng)[:MAX_BYTES]
        if rng.random() < 0.1:
            pool.append(data)
            if len(pool) > _POOL:
                pool[rng.randrange(_POOL)] = pool.pop()
        return data

    async def worker() -> None:
        while run.count < runs and time.monotonic() - began < seconds and not world.crashed():
            await run.one(world, next_input())

    run.sample(world)
    async with asyncio.TaskGroup() as group:
        for number in range(target.workers):
            group.create_task(worker(), name=f"worker-{number}")
    for service in world.crashed():
        run.note(Crashed(f"{service} ended: {world.log_tail(service)[-2000:]}"), b"")
    if not world.crashed():
        await run.slowest_alone(world)
    run.seconds = time.monotonic() - began
    run.sample(world)


def _load(name: str) -> LiveTarget:
    target: LiveTarget = importlib.import_module(f"tests.fuzz.live.{name}").TARGET
    return target


def _cpu_s(pid: int) -> float:
    """Returns the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
