"""Starts and drains the runners of a local stack as the store's figures want it.

Work is never killed for it: a runner that is to go finishes what it runs, however long that takes. A store that does not
answer leaves the fleet as it is.

Invariant: a runner counts until it was told to drain or has ended; it is told until then.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final, Protocol

from google.protobuf.duration_pb2 import Duration

from fulmen.errors import FulmenError
from fulmen.rpc.channel import open_channel
from fulmen.runner.v1 import runner_service_pb2
from fulmen.runner.v1.runner_service_pb2_grpc import RunnerServiceStub
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen.store.v1.runner_registry_service_pb2_grpc import RunnerRegistryServiceStub
from fulmen_cli.local.errors import ServiceFailedError
from fulmen_cli.local.fleet import FleetPace

__all__ = ["FleetKeeper", "Runners"]

LOOK_INTERVAL_S: Final = 2.0
CALL_LIMIT_S: Final = 5.0
TARGET_DRAIN_S: Final = 30.0
# As long as attempts may take.
DRAIN_GRACE_S: Final = 86_400
DEFAULT_SLOTS: Final = 64


def _say(text: str) -> None:
    sys.stderr.write(f"fleet: {text}\n")
    sys.stderr.flush()


class Runners(Protocol):
    """What has the runner processes: the supervisor; by name."""

    def ready_runners(self) -> dict[str, str]:
        """Returns the targets of the runners that work, by name; those that start, end or drain left out."""

    def runner_count(self) -> int:
        """Counts the runners that are there, those that drain left out."""

    def draining_runners(self) -> frozenset[str]:
        """Returns the names of the runners that were retired and have not ended."""

    async def start_runner(self) -> None:
        """Starts one more. Raises ServiceFailedError."""

    async def retire_runner(self, name: str) -> None:
        """Takes note that a runner drains: that it ends is no death of it."""

    def fleet_changed(self, text: str) -> None:
        """Shows how the fleet does, in a line."""


class FleetKeeper:
    """Background role of the supervisor: asks the store, and starts and drains runners."""

    def __init__(
        self,
        *,
        runners: Runners,
        pace: FleetPace,
        store_target: str,
        token: str,
        slots_per_runner: int = DEFAULT_SLOTS,
        interval_s: float = LOOK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wires the role; `token` is an administrator's."""
        self._runners = runners
        self._pace = pace
        self._store_target = store_target
        self._token = token
        self._slots_per_runner = slots_per_runner
        self._interval_s = interval_s
        self._clock = clock
        # Targets by name of the runners that were retired and have not heard of it.
        self._untold: dict[str, str] = {}

    async def run(self) -> None:
        """Looks until it is cancelled; a store that does not answer leaves the fleet as it is."""
        async with open_channel(self._store_target, token=self._token) as channel:
            registry = RunnerRegistryServiceStub(channel)
            while True:
                try:
                    await self._tell_to_drain()
                    await self._look(registry)
                except (FulmenError, ServiceFailedError) as error:
                    _say(f"not changed: {str(error).splitlines()[0]}")
                await asyncio.sleep(self._interval_s)

    async def _look(self, registry: RunnerRegistryServiceStub) -> None:
        limits = self._pace.limits
        request = pb.GetFleetDemandRequest(
            project="projects/*",
            target_drain=Duration(seconds=round(TARGET_DRAIN_S)),
            slots_per_runner=self._slots_per_runner,
            min_runners=limits.least,
            max_runners=limits.most,
        )
        demand = await registry.GetFleetDemand(request, timeout=CALL_LIMIT_S)
        untold = self._untold.keys() & self._runners.draining_runners()
        count = self._runners.runner_count() + len(untold)
        work_s = demand.predicted_work.ToTimedelta().total_seconds()
        self._runners.fleet_changed(
            f"auto {limits.least}-{limits.most}: {count} there, {demand.desired_runner_count} wanted "
            f"(queued {demand.queued_count}, running {demand.running_count}, work of {work_s:.0f} s)"
        )
        change = self._pace.decide(now_s=self._clock(), wanted=demand.desired_runner_count, count=count)
        if change > 0:
            _say(f"{change} more, {demand.desired_runner_count} are wanted")
            await asyncio.gather(*(self._runners.start_runner() for _ in range(change)))
        elif change < 0 and not untold:
            await self._drain_one(registry)

    async def _drain_one(self, registry: RunnerRegistryServiceStub) -> None:
        """Drains the runner that has least to do; of those the youngest."""
        ready = self._runners.ready_runners()
        listed = await registry.ListRunners(pb.ListRunnersRequest(page_size=1000), timeout=CALL_LIMIT_S)
        running = {each.info.address: each.running_count for each in listed.runners}
        numbered = {name: int(name.rpartition("-")[2]) for name in ready}
        for name in sorted(ready, key=lambda one: (running.get(ready[one], 0), -numbered[one]))[:1]:
            # Before it is told, or its end would be taken for a death and it would be started again.
            await self._runners.retire_runner(name)
            self._untold[name] = ready[name]
            _say(f"{name} is to drain, with {running.get(ready[name], 0)} attempts")
        await self._tell_to_drain()

    async def _tell_to_drain(self) -> None:
        """Tells retired runners to drain; those that cannot be told are told again at the next look."""
        draining = self._runners.draining_runners()
        for name, target in list(self._untold.items()):
            if name in draining:
                request = runner_service_pb2.DrainRequest(grace=Duration(seconds=DRAIN_GRACE_S))
                try:
                    async with open_channel(target, token=self._token) as channel:
                        await RunnerServiceStub(channel).Drain(request, timeout=CALL_LIMIT_S)
                except FulmenError as error:
                    _say(f"{name} was not told to drain, and is told again: {str(error).splitlines()[0]}")
                    continue
            del self._untold[name]
