"""fulmen.llm_proxy.v1.RouteService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc.aio

from fulmen.errors import ArgumentInvalid, BackendNotFound, ResourceNotFound, RouteExists, RouteNotFound, Violation
from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2, route_service_pb2_grpc
from fulmen_llm_proxy.routing.codec import (
    ROUTE_KIND,
    decode_route,
    model_of,
    parse_route,
    route_resource,
)
from fulmen_llm_proxy.routing.resources import Document, ResourceCache, ResourceWriter
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.transport.paging import page_of


class RouteServicer(route_service_pb2_grpc.RouteServiceServicer):
    """Changes routes in the store; reads them from this replica's table.

    Changes are serialised: each starts from the result of the one before.
    """

    def __init__(
        self,
        *,
        resources: ResourceCache,
        tables: TableHolder,
        writer: ResourceWriter,
        changing: asyncio.Lock,
        draining: asyncio.Event,
    ) -> None:
        self._resources = resources
        self._tables = tables
        self._writer = writer
        self._changing = changing
        self._draining = draining

    async def PutRoute(
        self, request: route_service_pb2.PutRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.PutRouteResponse:
        """Adds or replaces a route."""
        route = decode_route(request.route)
        self._tables.require_loaded()
        named = {target.backend_id for target in route.targets}

        def wanted() -> list[route_pb2.Route]:
            unknown = [f"backends/{backend_id}" for backend_id in sorted(named - self._tables.current.backends.keys())]
            if unknown:
                raise BackendNotFound(f"Backend {', '.join(unknown)} not found.", backend=", ".join(unknown))
            return [self._owned(request.route, route.model)]

        async with self._changing:
            [changed] = await self._put(wanted)
        return route_service_pb2.PutRouteResponse(route=changed)

    async def GetRoute(
        self, request: route_service_pb2.GetRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.GetRouteResponse:
        """Returns a route."""
        return route_service_pb2.GetRouteResponse(route=self._current(model_of(request.name)))

    async def ListRoutes(
        self, request: route_service_pb2.ListRoutesRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.ListRoutesResponse:
        """Lists routes by name."""
        routes, token = page_of(
            [(route.name, route) for route in self._all()],
            page_size=request.page_size,
            page_token=request.page_token,
        )
        return route_service_pb2.ListRoutesResponse(routes=routes, next_page_token=token)

    async def PromoteVersion(
        self, request: route_service_pb2.PromoteVersionRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.PromoteVersionResponse:
        """Sets the policy version that a policy's targets serve."""
        if not request.policy or request.policy_version < 1:
            problem = Violation(field="policy", description="needs a policy and a positive version")
            raise ArgumentInvalid("The request is malformed.", violations=[problem])

        def promoted() -> list[route_pb2.Route]:
            changed = {}
            for route in self._all():
                for target in route.targets:
                    if target.policy == request.policy and request.backend in ("", target.backend):
                        target.policy_version = request.policy_version
                        changed[route.name] = route
            if not changed:
                where = f" at {request.backend}" if request.backend else ""
                raise RouteNotFound(f"No route serves the policy '{request.policy}'{where}.", policy=request.policy)
            return list(changed.values())

        async with self._changing:
            return route_service_pb2.PromoteVersionResponse(routes=await self._put(promoted))

    async def SplitTraffic(
        self, request: route_service_pb2.SplitTrafficRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.SplitTrafficResponse:
        """Sets the weights of a route's targets."""
        model = model_of(request.name)

        def split() -> list[route_pb2.Route]:
            route = self._current(model)
            _split(route, request)
            decode_route(route)  # validates that a positive weight is left, and none is out of range
            return [route]

        async with self._changing:
            [changed] = await self._put(split)
        return route_service_pb2.SplitTrafficResponse(route=changed)

    async def DeleteRoute(
        self, request: route_service_pb2.DeleteRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.DeleteRouteResponse:
        """Deletes a route."""
        model = model_of(request.name)

        def removed() -> dict[str, bytes]:
            self._current(model)
            return {route_resource(model): b""}

        with suppress(RouteNotFound):
            async with self._changing:
                await self._writer.change(ROUTE_KIND, removed)
        return route_service_pb2.DeleteRouteResponse()

    async def RollbackRoute(
        self, request: route_service_pb2.RollbackRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.RollbackRouteResponse:
        """Restores an earlier version of a route."""
        model = model_of(request.name)
        async with self._changing:
            version = request.version or await self._writer.current(lambda: self._latest(model)) - 1
            if version < 1:
                raise ResourceNotFound(f"The route {request.name} has no earlier version.", route=request.name)
            content = await self._writer.content(route_resource(model), version)
            if not content:
                raise ResourceNotFound(f"Version {version} of {request.name} is its removal.", route=request.name)
            [changed] = await self._put(lambda: [self._restored(content)])
        return route_service_pb2.RollbackRouteResponse(route=changed)

    def _restored(self, content: bytes) -> route_pb2.Route:
        """Returns an earlier version that records what the route records now: no rollback begins to record again."""
        restored = parse_route(content)
        restored.ClearField("recording")
        current = next((each for each in self._all() if each.name == restored.name), None)
        if current is not None and current.HasField("recording"):
            restored.recording.CopyFrom(current.recording)
        return restored

    async def WatchRoutes(
        self, _: route_service_pb2.WatchRoutesRequest, __: grpc.aio.ServicerContext
    ) -> AsyncIterator[route_service_pb2.WatchRoutesResponse]:
        """Streams all routes, then each change, until the caller disconnects or the proxy drains."""
        while not self._tables.is_loaded:
            await self._tables.next_change()
        sent = {route.name: route for route in self._all()}
        yield route_service_pb2.WatchRoutesResponse(routes=sent.values(), snapshot_complete=True)
        drained = asyncio.create_task(self._draining.wait(), name="watch-routes-drain")
        try:
            while not self._draining.is_set():
                change = asyncio.create_task(self._tables.next_change(), name="watch-routes")
                current = {route.name: route for route in self._all()}
                changed = [route for name, route in current.items() if sent.get(name) != route]
                removed = sorted(sent.keys() - current.keys())
                if changed or removed:
                    sent = current
                    yield route_service_pb2.WatchRoutesResponse(routes=changed, removed=removed)
                try:
                    await asyncio.wait([change, drained], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
        finally:
            drained.cancel()

    def _all(self) -> list[route_pb2.Route]:
        self._tables.require_loaded()
        return [_as_message(document) for document in self._resources.of_kind(ROUTE_KIND).values()]

    def _latest(self, model: str) -> int:
        """Returns the latest version number of a route, which may be its removal."""
        document = self._resources.documents.get(route_resource(model))
        return self._current(model).version if document is None else document.version

    def _current(self, model: str) -> route_pb2.Route:
        self._tables.require_loaded()
        document = self._resources.find(route_resource(model))
        if document is None:
            served = ", ".join(sorted(self._tables.current.routes)) or "none"
            raise RouteNotFound(f"Route routes/{model} not found. Served: {served}.", model=model, served=served)
        return _as_message(document)

    def _owned(self, wanted: route_pb2.Route, model: str) -> route_pb2.Route:
        """Returns a wanted route; one without a project, an operator's, has that of the present route.

        One with a project, a run's, has the recording that the operator set.

        Raises:
            RouteExists: if it has a project, and the present route is not that project's.
        """
        present = self._resources.find(route_resource(model))
        if present is None:
            return wanted
        held = parse_route(present.content)
        if wanted.project not in ("", held.project):
            raise RouteExists(f"The model name '{model}' is in use outside {wanted.project}.", model=model)
        owned = route_pb2.Route()
        owned.CopyFrom(wanted)
        owned.project = held.project
        if wanted.project and held.HasField("recording"):
            owned.recording.CopyFrom(held.recording)
        return owned

    async def _put(self, make: Callable[[], list[route_pb2.Route]]) -> list[route_pb2.Route]:
        """Publishes the routes that differ from the current ones; returns all resulting routes."""
        models: list[str] = []

        def changed() -> dict[str, bytes]:
            routes = make()
            models[:] = [model_of(route.name) for route in routes]
            contents = {}
            for model, route in zip(models, routes, strict=True):
                wanted = route_pb2.Route()
                wanted.CopyFrom(route)
                wanted.version = 0
                held = self._resources.find(route_resource(model))
                if held is None or parse_route(held.content) != wanted:
                    contents[route_resource(model)] = wanted.SerializeToString(deterministic=True)
            return contents

        await self._writer.change(ROUTE_KIND, changed)
        return [self._current(model) for model in models]


def _split(route: route_pb2.Route, request: route_service_pb2.SplitTrafficRequest) -> None:
    """Sets the weights of a route's targets.

    Raises:
        ArgumentInvalid: if the route does not have a backend or version; names all of them.
    """
    if bool(request.weights) == bool(request.version_weights):
        problem = Violation(field="weights", description="give either weights or version_weights")
        raise ArgumentInvalid("The request is malformed.", violations=[problem])
    backends = {target.backend for target in route.targets}
    versions = {target.policy_version for target in route.targets}
    problems = [
        Violation(field=f"weights[{name}]", description="is no backend of the route")
        for name in request.weights
        if name not in backends
    ] + [
        Violation(field=f"version_weights[{version}]", description="is no policy version of the route")
        for version in request.version_weights
        if version not in versions
    ]
    if problems:
        raise ArgumentInvalid("The request is malformed.", violations=problems)
    for target in route.targets:
        if target.backend in request.weights:
            target.weight = request.weights[target.backend]
        if target.policy_version in request.version_weights:
            target.weight = request.version_weights[target.policy_version]


def _as_message(document: Document) -> route_pb2.Route:
    route = parse_route(document.content)
    route.version = document.version
    return route
