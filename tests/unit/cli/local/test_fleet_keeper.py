"""The keeper of a fleet whose runner cannot be told to drain: over real sockets, against a registry that wants as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from fulmen.runner.v1 import runner_service_pb2
from fulmen.runner.v1.runner_service_pb2_grpc import RunnerServiceServicer, add_RunnerServiceServicer_to_server
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen.store.v1.runner_registry_service_pb2_grpc import (
    RunnerRegistryServiceServicer,
    add_RunnerRegistryServiceServicer_to_server,
)
from fulmen_cli.local.fleet import FleetKeeper, FleetPace, FleetRange

LIMIT_S = 30
LIMITS = FleetRange(minimum=1, maximum=2)
REFUSED = 3


class Services(RunnerRegistryServiceServicer, RunnerServiceServicer):
    """A registry that wants one runner, and two once one was asked to drain; runners that refuse that a few times."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def GetFleetDemand(self, request: pb.GetFleetDemandRequest, context: Any) -> pb.GetFleetDemandResponse:
        return pb.GetFleetDemandResponse(desired_runner_count=2 if self.fleet.asked else 1)

    async def ListRunners(self, request: pb.ListRunnersRequest, context: Any) -> pb.ListRunnersResponse:
        return pb.ListRunnersResponse()

    async def Drain(self, request: runner_service_pb2.DrainRequest, context: Any) -> runner_service_pb2.DrainResponse:
        self.fleet.asked += 1
        if self.fleet.asked == self.fleet.ends_at:
            self.fleet.draining.clear()
        if self.fleet.asked <= REFUSED:
            await context.abort(grpc.StatusCode.INTERNAL, "not now")
        return runner_service_pb2.DrainResponse()


class Fleet:
    """Two runners; that a third starts ends the test."""

    def __init__(self, ends_at: int) -> None:
        self.ends_at = ends_at
        self.target = ""
        self.asked = 0
        self.ready = {"runner-1", "runner-2"}
        self.draining: set[str] = set()
        self.started = asyncio.Event()

    def ready_runners(self) -> dict[str, str]:
        return dict.fromkeys(self.ready, self.target)

    def runner_count(self) -> int:
        return len(self.ready)

    def draining_runners(self) -> frozenset[str]:
        return frozenset(self.draining)

    async def start_runner(self) -> None:
        self.ready.add("runner-3")
        self.started.set()

    async def retire_runner(self, name: str) -> None:
        self.ready.remove(name)
        self.draining.add(name)

    def fleet_changed(self, text: str) -> None:
        pass


@asynccontextmanager
async def served(fleet: Fleet) -> AsyncIterator[str]:
    server = grpc.aio.server()
    services = Services(fleet)
    add_RunnerRegistryServiceServicer_to_server(services, server)
    add_RunnerServiceServicer_to_server(services, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(("ends_at", "asked"), [(0, REFUSED + 1), (2, 2)], ids=["told at last", "ended before"])
async def test_a_runner_counts_until_it_was_told_to_drain_or_has_ended(ends_at: int, asked: int) -> None:
    fleet = Fleet(ends_at)
    async with asyncio.timeout(LIMIT_S), served(fleet) as fleet.target:
        pace = FleetPace(LIMITS, start_pause_s=0, shrink_after_s=0, shrink_pause_s=0)
        keeper = FleetKeeper(runners=fleet, pace=pace, store_target=fleet.target, token=lambda: "t", interval_s=0.01)
        keeping = asyncio.create_task(keeper.run())
        starting = asyncio.create_task(fleet.started.wait())
        await asyncio.wait({keeping, starting}, return_when=asyncio.FIRST_COMPLETED)
        assert fleet.asked == asked, "none was started in its place while it worked"
        assert fleet.ready == {"runner-1", "runner-3"}
        keeping.cancel()
        await asyncio.wait({keeping})
