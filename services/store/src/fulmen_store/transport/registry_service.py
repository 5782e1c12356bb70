"""`RunnerRegistryService` over gRPC: live runners, from the sessions of the lease service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from uuid import UUID

import grpc.aio

from fulmen.errors import ArgumentInvalid, Draining, RunnerNotFound
from fulmen.ids import parse_runner_name, runner_name
from fulmen.store.v1 import runner_registry_service_pb2 as pb
from fulmen.store.v1 import runner_registry_service_pb2_grpc
from fulmen_service_kit.rpc.message_sizes import MESSAGE_BYTES, fitting, parts_of
from fulmen_service_kit.security.auth import require_project
from fulmen_store.malformed import malformed
from fulmen_store.runners.fleet import FleetChanges, FleetWatcher
from fulmen_store.runners.fleet_demand import FleetDemand
from fulmen_store.runners.orders import OrderDraft, RunnerOrders
from fulmen_store.runners.table import RunnerTable, RunnerView
from fulmen_store.transport.access import project_limit, require_range
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.wire.leases import has_labels, runner_of
from fulmen_store.transport.wire.queues import demand_message, demand_query

__all__ = ["RunnerRegistryService"]

DEFAULT_PAGE = 50
LISTED = "runners"
MAX_LABELS = 64
# Each name has 44 bytes.
REMOVED_IN_MESSAGE = 10_000
MAX_SLOTS = 10_000
MAX_GRACE_S = 3600.0


class RunnerRegistryService(runner_registry_service_pb2_grpc.RunnerRegistryServiceServicer):
    """Serves the live runner sessions."""

    def __init__(
        self,
        *,
        table: RunnerTable,
        fleet: FleetWatcher,
        demand: FleetDemand,
        orders: RunnerOrders,
        stopping: asyncio.Event,
    ) -> None:
        """Creates the servicer; `stopping` is set when the replica shuts down."""
        self._orders = orders
        self._table = table
        self._demand = demand
        self._fleet = fleet
        self._stopping = stopping

    async def ListRunners(
        self, request: pb.ListRunnersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRunnersResponse:
        """Lists live sessions, oldest first."""
        last = decode_token(request.page_token, listed=LISTED, key_bytes=16)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        after = UUID(int=0) if last is None else UUID(bytes=last)
        found = await self._table.page(
            after=after, limit=limit + 1, project=project_limit(), with_history=request.with_load_history
        )
        shown = fitting(runner_of(view) for view in found[:limit])
        token = encode_token(found[len(shown) - 1].session_id.bytes, listed=LISTED) if len(shown) < len(found) else ""
        return pb.ListRunnersResponse(runners=shown, next_page_token=token)

    async def GetRunner(self, request: pb.GetRunnerRequest, context: grpc.aio.ServicerContext) -> pb.GetRunnerResponse:
        """Returns one live session."""
        return pb.GetRunnerResponse(runner=runner_of(await self._find(request.name)))

    async def WatchRunners(
        self, request: pb.WatchRunnersRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchRunnersResponse]:
        """Streams the fleet, then its changes."""
        if len(request.labels) > MAX_LABELS:
            raise malformed("labels", f"has more than {MAX_LABELS} entries")
        wanted: Callable[[RunnerView], bool] = has_labels(dict(request.labels))
        fleet = self._fleet.follow(project=project_limit(), wanted=wanted, stopping=self._stopping.is_set)
        async with aclosing(fleet):
            async for changes in fleet:
                for message in _messages(changes):
                    yield message
        raise Draining("The store is shutting down: open the stream again.")

    async def GetFleetDemand(
        self, request: pb.GetFleetDemandRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetFleetDemandResponse:
        """Returns the number of runners that running and queued rollouts need."""
        return demand_message(*await self._demand.demand(demand_query(request)))

    async def SetRunnerSlots(
        self, request: pb.SetRunnerSlotsRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetRunnerSlotsResponse:
        """Orders a runner to set its slots."""
        if request.automatic:
            require_range("slot_count", request.slot_count, 0, 0)
        else:
            require_range("slot_count", request.slot_count, 1, MAX_SLOTS)
        runner = await self._order(request.name, OrderDraft(slots=request.slot_count))
        return pb.SetRunnerSlotsResponse(runner=runner)

    async def DrainRunner(
        self, request: pb.DrainRunnerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainRunnerResponse:
        """Orders a runner to drain."""
        grace_s = None
        if request.HasField("grace"):
            grace_s = request.grace.seconds + request.grace.nanos / 1e9
            require_range("grace", grace_s, 0, MAX_GRACE_S)
        runner = await self._order(request.name, OrderDraft(drains=True, grace_s=grace_s))
        return pb.DrainRunnerResponse(runner=runner)

    async def _order(self, name: str, draft: OrderDraft) -> pb.Runner:
        view = await self._find(name)
        require_project(view.project)
        if not await self._orders.order(view.session_id, draft):
            raise _not_found(name)
        return runner_of(await self._find(name))

    async def _find(self, name: str) -> RunnerView:
        try:
            view = await self._table.find(parse_runner_name(name, field="name"), project=project_limit())
        except ArgumentInvalid:
            view = None
        if view is None:
            raise _not_found(name)
        return view


def _not_found(name: str) -> RunnerNotFound:
    return RunnerNotFound("The runner session does not exist.", runner=name[:128])


def _messages(changes: FleetChanges) -> Iterator[pb.WatchRunnersResponse]:
    message = pb.WatchRunnersResponse(snapshot_complete=changes.snapshot_complete)
    for removed in parts_of(changes.removed, REMOVED_IN_MESSAGE):
        if message.removed:
            yield message
            message = pb.WatchRunnersResponse()
        message.removed.extend(map(runner_name, removed))
    size_bytes = message.ByteSize()
    for view in changes.runners:
        runner = runner_of(view)
        size_bytes += runner.ByteSize()
        if message.runners and size_bytes > MESSAGE_BYTES:
            yield message
            message, size_bytes = pb.WatchRunnersResponse(), runner.ByteSize()
        message.runners.append(runner)
    yield message
