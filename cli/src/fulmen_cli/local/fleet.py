"""Scales the runners of a local stack with the queue."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from google.protobuf.duration_pb2 import Duration

from fulmen.errors import FulmenError
from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import runner_service_pb2
from fulmen.runner.v1.runner_service_pb2_grpc import RunnerServiceStub
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen.store.v1.runner_registry_service_pb2_grpc import RunnerRegistryServiceStub
from fulmen_cli.local.errors import ServiceFailedError

__all__ = ["FleetKeeper", "FleetPace", "FleetRange", "Runners", "fleet_range", "max_runners_here"]

START_PAUSE_S: Final = 5.0
SHRINK_AFTER_S: Final = 30.0
SHRINK_PAUSE_S: Final = 10.0

MAX_RUNNERS: Final = 64
BYTES_PER_RUNNER: Final = 512 * 2**20
# What the other services and the database need.
BYTES_BESIDES: Final = 1024 * 2**20
MEMORY_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")

_RANGE: Final = re.compile(r"auto(?::(\d{1,4})-(\d{1,4}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRange:
    """Minimum and maximum number of runners; equal if it is fixed."""

    minimum: int
    maximum: int


def fleet_range(text: str) -> FleetRange:
    """Parses `3`, `auto` or `auto:1-8`; `0` if runners start elsewhere.

    Raises:
        ValueError: if it is none of these, or out of 0 to 64; `auto` begins with 1.
    """
    if text.isdecimal():
        minimum = maximum = int(text[:9])
        if not minimum:
            return FleetRange(minimum=0, maximum=0)
    elif match := _RANGE.fullmatch(text):
        minimum, maximum = (int(match[1]), int(match[2])) if match[1] else (1, max_runners_here())
    else:
        raise ValueError("must be a number, `auto` or `auto:MIN-MAX`")
    if not 1 <= minimum <= maximum <= MAX_RUNNERS:
        raise ValueError(f"must be 0 to {MAX_RUNNERS}, with 1 <= MIN <= MAX")
    return FleetRange(minimum=minimum, maximum=maximum)


def max_runners_here() -> int:
    """Returns the maximum number of runners of this machine: one per processor and 512 MiB of memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = MEMORY_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    if limit.isdecimal():
        memory_bytes = min(memory_bytes, int(limit))
    return max(1, min(cpus, (memory_bytes - BYTES_BESIDES) // BYTES_PER_RUNNER, MAX_RUNNERS))


class FleetPace:
    """Decides how many runners to start or drain. Pure: the caller passes monotonic seconds.

    Invariants: it never leaves the range; it at most doubles the runners in one step, and not again before these had
    time to work; it drains one at a time, and only when fewer were wanted for a while.
    """

    def __init__(
        self,
        limits: FleetRange,
        *,
        start_pause_s: float = START_PAUSE_S,
        shrink_after_s: float = SHRINK_AFTER_S,
        shrink_pause_s: float = SHRINK_PAUSE_S,
    ) -> None:
        """Takes the limits and the pauses."""
        self.limits = limits
        self._start_pause_s = start_pause_s
        self._shrink_after_s = shrink_after_s
        self._shrink_pause_s = shrink_pause_s
        self._wanted: deque[tuple[float, int]] = deque()
        self._first_s: float | None = None
        self._started_s = -math.inf
        self._drained_s = -math.inf

    def decide(self, *, now_s: float, wanted: int, count: int) -> int:
        """Returns the number of runners to start, or if negative to drain. Call it every few seconds.

        Args:
            now_s: monotonic seconds.
            wanted: Number of runners for the current demand.
            count: how many run and do not drain.
        """
        wanted = max(self.limits.minimum, min(self.limits.maximum, wanted))
        self._first_s = now_s if self._first_s is None else self._first_s
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - self._shrink_after_s:
            self._wanted.popleft()
        if wanted > count:
            return self._start(now_s, min(wanted - count, max(1, count)))
        lately = max(each for _, each in self._wanted)
        watched = now_s - max(self._first_s, self._started_s) >= self._shrink_after_s
        if lately < count and watched and now_s - self._drained_s >= self._shrink_pause_s:
            self._drained_s = now_s
            return -1
        return 0

    def _start(self, now_s: float, more: int) -> int:
        if now_s - self._started_s < self._start_pause_s:
            return 0
        self._started_s = now_s
        return more


POLL_INTERVAL_S: Final = 2.0
CALL_LIMIT_S: Final = 5.0
TARGET_DRAIN_S: Final = 30.0
# As long as attempts may take.
DRAIN_GRACE_S: Final = 86_400
DEFAULT_SLOTS: Final = 64


def _say(text: str) -> None:
    sys.stderr.write(f"fleet: {text}\n")
    sys.stderr.flush()


class Runners(Protocol):
    """The owner of the runner processes."""

    def ready_runners(self) -> dict[str, str]:
        """Returns the targets of the ready runners, by name, without draining ones."""

    def runner_count(self) -> int:
        """Returns the number of runners, without draining ones."""

    def draining_runners(self) -> frozenset[str]:
        """Returns the names of the retired runners that have not exited."""

    async def start_runner(self) -> None:
        """Starts another runner. Raises ServiceFailedError."""

    async def retire_runner(self, name: str) -> None:
        """Marks a runner as draining: its exit is expected."""

    def fleet_changed(self, text: str) -> None:
        """Updates the status line of the fleet."""


class FleetKeeper:
    """Background role of the supervisor: starts and drains runners as the store's demand requires."""

    def __init__(
        self,
        *,
        runners: Runners,
        pace: FleetPace,
        store_target: str,
        token: Callable[[], str],
        slots_per_runner: int = DEFAULT_SLOTS,
        interval_s: float = POLL_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes what returns an administrator's token."""
        self._runners = runners
        self._pace = pace
        self._store_target = store_target
        self._token = token
        self._slots_per_runner = slots_per_runner
        self._interval_s = interval_s
        self._clock = clock
        # Targets of retired runners whose drain request has not succeeded, by name.
        self._untold: dict[str, str] = {}

    async def run(self) -> None:
        """Runs until cancelled; while the store does not answer, the fleet stays as it is."""
        async with open_channel(self._store_target, token=self._token) as channel:
            registry = RunnerRegistryServiceStub(channel)
            while True:
                try:
                    await self._request_drains()
                    await self._poll(registry)
                except (FulmenError, ServiceFailedError) as error:
                    _say(f"not changed: {str(error).splitlines()[0]}")
                await asyncio.sleep(self._interval_s)

    async def _poll(self, registry: RunnerRegistryServiceStub) -> None:
        limits = self._pace.limits
        request = pb.GetFleetDemandRequest(
            project="projects/*",
            target_drain=Duration(seconds=round(TARGET_DRAIN_S)),
            slots_per_runner=self._slots_per_runner,
            min_runners=limits.minimum,
            max_runners=limits.maximum,
        )
        demand = await registry.GetFleetDemand(request, timeout=CALL_LIMIT_S)
        untold = self._untold.keys() & self._runners.draining_runners()
        count = self._runners.runner_count() + len(untold)
        work_s = demand.predicted_work.ToTimedelta().total_seconds()
        self._runners.fleet_changed(
            f"auto {limits.minimum}-{limits.maximum}: {count} runners, {demand.desired_runner_count} wanted "
            f"(queued {demand.queued_count}, running {demand.running_count}, work of {work_s:.0f} s)"
        )
        change = self._pace.decide(now_s=self._clock(), wanted=demand.desired_runner_count, count=count)
        if change > 0:
            _say(f"{change} more, {demand.desired_runner_count} desired")
            await asyncio.gather(*(self._runners.start_runner() for _ in range(change)))
        elif change < 0 and not untold:
            await self._drain_one(registry)

    async def _drain_one(self, registry: RunnerRegistryServiceStub) -> None:
        """Drains the runner with the fewest attempts, the youngest on a tie."""
        ready = self._runners.ready_runners()
        listed = await registry.ListRunners(pb.ListRunnersRequest(page_size=1000), timeout=CALL_LIMIT_S)
        running = {each.info.address: each.running_count for each in listed.runners}
        numbered = {name: int(name.rpartition("-")[2]) for name in ready}
        for name in sorted(ready, key=lambda one: (running.get(ready[one], 0), -numbered[one]))[:1]:
            # Mark it first, or its exit would be taken for a crash.
            await self._runners.retire_runner(name)
            self._untold[name] = ready[name]
            _say(f"draining {name}, which has {running.get(ready[name], 0)} attempts")
        await self._request_drains()

    async def _request_drains(self) -> None:
        """Sends drain requests to retired runners; failed ones are retried at the next poll."""
        draining = self._runners.draining_runners()
        for name, target in list(self._untold.items()):
            if name in draining:
                request = runner_service_pb2.DrainRequest(grace=Duration(seconds=DRAIN_GRACE_S))
                try:
                    async with open_channel(target, token=self._token) as channel:
                        await RunnerServiceStub(channel).Drain(request, timeout=CALL_LIMIT_S)
                except FulmenError as error:
                    _say(f"drain request to {name} failed, retrying: {str(error).splitlines()[0]}")
                    continue
            del self._untold[name]
