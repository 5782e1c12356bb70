"""fulmen.llm_proxy.v1.RouteService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import grpc.aio
import structlog

from fulmen.errors import (
    ArgumentInvalid,
    BackendNotFound,
    QuotaExceeded,
    ResourceNotFound,
    RouteExists,
    RouteNotFound,
    Violation,
)
from fulmen.kinds import policy_problem
from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2, route_service_pb2_grpc
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.routing.codec import (
    ROUTE_KIND,
    backend_resource,
    decode_route,
    model_of,
    parse_backend,
    parse_route,
    route_resource,
)
from fulmen_llm_proxy.routing.owned_file import FileSet, OwnedFiles, require_unowned
from fulmen_llm_proxy.routing.resources import Document, ResourceWriter
from fulmen_llm_proxy.transport.paging import page_of
from fulmen_llm_proxy.transport.views import Views
from fulmen_service_kit.rpc.message_sizes import fitting, messages_of

_log = structlog.get_logger(__name__)


class RouteServicer(route_service_pb2_grpc.RouteServiceServicer):
    """Changes routes in the store; reads them from this replica's table.

    Changes are serialised: each starts from the result of the one before.
    """

    def __init__(
        self,
        *,
        writer: ResourceWriter,
        views: Views,
        metrics: RoutingMetrics,
        draining: asyncio.Event,
        max_of_project: int,
    ) -> None:
        """Sets what changes routes, what callers see of them, and the maximum number of routes of a project."""
        self._metrics = metrics
        self._resources = writer.resources
        self._tables = writer.tables
        self._writer = writer
        self._views = views
        self._files = OwnedFiles(writer)
        self._draining = draining
        self._max_of_project = max_of_project

    async def PutRoute(
        self, request: route_service_pb2.PutRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.PutRouteResponse:
        """Adds or replaces a route."""
        route = decode_route(request.route)
        request.route.ClearField("file")
        await self._tables.loaded()
        named = {target.backend_id for target in route.targets}

        def wanted() -> list[route_pb2.Route]:
            unknown = [f"backends/{backend_id}" for backend_id in sorted(named - self._tables.current.backends.keys())]
            if unknown:
                raise BackendNotFound(f"Backend {', '.join(unknown)} not found.", backend=", ".join(unknown))
            return [self._owned(request.route, route.model)]

        async with self._writer.changing:
            [changed] = await self._put(wanted)
        return route_service_pb2.PutRouteResponse(route=changed)

    async def GetRoute(
        self, request: route_service_pb2.GetRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.GetRouteResponse:
        """Returns a route, if the caller sees it."""
        model = model_of(request.name)
        seen = {route.name: route for route in self._seen()}
        if request.name not in seen:
            raise _not_found(model, map(model_of, seen))
        return route_service_pb2.GetRouteResponse(route=seen[request.name])

    async def ListRoutes(
        self, request: route_service_pb2.ListRoutesRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.ListRoutesResponse:
        """Lists routes that the caller sees, by name."""
        await self._tables.loaded()
        routes, token = page_of(
            [(route.name, route) for route in self._seen()],
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

        replaced = 0

        def promoted() -> list[route_pb2.Route]:
            nonlocal replaced
            changed, replaced = {}, 0
            for route in self._all():
                for target in route.targets:
                    if target.policy == request.policy and request.backend in ("", target.backend):
                        replaced = max(replaced, target.policy_version)
                        target.policy_version = request.policy_version
                        changed[route.name] = route
            if not changed:
                where = f" at {request.backend}" if request.backend else ""
                raise RouteNotFound(f"No route serves the policy '{request.policy}'{where}.", policy=request.policy)
            return list(changed.values())

        async with self._writer.changing:
            routes = fitting(await self._put(promoted))
        if replaced <= request.policy_version:
            return route_service_pb2.PromoteVersionResponse(routes=routes)
        self._metrics.stepped_back()
        _log.warning(
            "lower_version_promoted", policy=request.policy, version=request.policy_version, replaced_version=replaced
        )
        return route_service_pb2.PromoteVersionResponse(routes=routes, replaced_version=replaced)

    async def SplitTraffic(
        self, request: route_service_pb2.SplitTrafficRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.SplitTrafficResponse:
        """Sets the weights of a route's targets."""
        model = model_of(request.name)

        def split() -> list[route_pb2.Route]:
            route = self._current(model)
            require_unowned(route)
            _split(route, request)
            decode_route(route)  # validates that a positive weight is left, and none is out of range
            return [route]

        async with self._writer.changing:
            [changed] = await self._put(split)
        return route_service_pb2.SplitTrafficResponse(route=changed)

    async def DeleteRoute(
        self, request: route_service_pb2.DeleteRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.DeleteRouteResponse:
        """Deletes a route."""
        model = model_of(request.name)

        def removed() -> dict[str, bytes]:
            require_unowned(self._current(model))
            return {route_resource(model): b""}

        with suppress(RouteNotFound):
            async with self._writer.changing:
                await self._writer.change(removed)
        return route_service_pb2.DeleteRouteResponse()

    async def RollbackRoute(
        self, request: route_service_pb2.RollbackRouteRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.RollbackRouteResponse:
        """Restores an earlier version of a route."""
        model = model_of(request.name)
        async with self._writer.changing:
            version = request.version or await self._writer.current(lambda: self._latest(model)) - 1
            if version < 1:
                raise ResourceNotFound(f"The route {request.name} has no earlier version.", route=request.name)
            content = await self._writer.content(route_resource(model), version)
            if not content:
                raise ResourceNotFound(f"Version {version} of {request.name} is its deletion.", route=request.name)
            [changed] = await self._put(lambda: [self._restored(content)])
        return route_service_pb2.RollbackRouteResponse(route=changed)

    def _restored(self, content: bytes) -> route_pb2.Route:
        """Returns an earlier version that records what the route records now: no rollback begins to record again."""
        restored = parse_route(content)
        for kept in ("recording", "file"):
            restored.ClearField(kept)
        current = next((each for each in self._all() if each.name == restored.name), None)
        if current is not None:
            require_unowned(current)
            if current.HasField("recording"):
                restored.recording.CopyFrom(current.recording)
        return restored

    async def ApplyFile(
        self, request: route_service_pb2.ApplyFileRequest, _: grpc.aio.ServicerContext
    ) -> route_service_pb2.ApplyFileResponse:
        """Makes what a file owns its set."""
        wanted = FileSet(file=request.file, backends=request.backends, routes=request.routes)
        changes = await self._files.apply(wanted)
        return route_service_pb2.ApplyFileResponse(
            added=changes.added, changed=changes.changed, deleted=changes.deleted
        )

    async def WatchRoutes(
        self, _: route_service_pb2.WatchRoutesRequest, __: grpc.aio.ServicerContext
    ) -> AsyncIterator[route_service_pb2.WatchRoutesResponse]:
        """Streams all routes that the caller sees, then each change, until the caller disconnects or the proxy drains."""
        while not self._tables.is_loaded:
            await self._tables.next_change()
        sent = {route.name: route for route in self._seen()}
        for message in _messages(sent.values(), snapshot_complete=True):
            yield message
        drained = asyncio.create_task(self._draining.wait(), name="watch-routes-drain")
        try:
            while not self._draining.is_set():
                change = asyncio.create_task(self._tables.next_change(), name="watch-routes")
                current = {route.name: route for route in self._seen()}
                changed = [route for name, route in current.items() if sent.get(name) != route]
                removed = sorted(sent.keys() - current.keys())
                sent = current
                if changed or removed:
                    for message in _messages(changed, removed=removed):
                        yield message
                try:
                    await asyncio.wait([change, drained], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
        finally:
            drained.cancel()

    def _seen(self) -> list[route_pb2.Route]:
        """Returns the routes that the caller sees."""
        self._tables.require_loaded()
        return self._views.routes()

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
            raise _not_found(model, self._tables.current.routes)
        return _as_message(document)

    def _owned(self, wanted: route_pb2.Route, model: str) -> route_pb2.Route:
        """Returns a wanted route; one without a project, an operator's, has that of the present route.

        One with a project, a run's, has the recording that the operator set.

        Raises:
            RouteExists: if it has a project, and the present route is not that project's.
            ManagedByFile: if a file owns the present route.
            QuotaExceeded: if it is new, and its project has as many routes as it may.
        """
        present = self._resources.find(route_resource(model))
        if present is None:
            self._require_room(wanted.project)
            return wanted
        held = parse_route(present.content)
        if wanted.project not in ("", held.project):
            raise RouteExists(f"The model name '{model}' is in use outside {wanted.project}.", model=model)
        require_unowned(held)
        owned = route_pb2.Route()
        owned.CopyFrom(wanted)
        owned.project = held.project
        if wanted.project and held.HasField("recording"):
            owned.recording.CopyFrom(held.recording)
        return owned

    def _require_room(self, project: str) -> None:
        held = sum(route.project == project for route in self._tables.current.routes.values())
        if project and held >= self._max_of_project:
            raise QuotaExceeded(
                f"{project} has {held} model names, which is the maximum (project_max_routes). Delete a route of it "
                "(`fulmen proxy route delete`); an operator can raise the limit.",
                project=project,
                quota="project_routes",
            )

    def _require_trainable(self, routes: Sequence[route_pb2.Route]) -> None:
        """Checks that targets with a policy are at backends whose tokens can be trained on.

        Raises:
            ArgumentInvalid: if one is not.
        """
        held = {
            target.backend: self._resources.find(backend_resource(target.backend.removeprefix("backends/")))
            for route in routes
            for target in route.targets
            if target.policy
        }
        problems = {name: policy_problem(parse_backend(found.content)) for name, found in held.items() if found}
        violations = [
            Violation(field=f"route.targets[{at}].policy", description=problems[target.backend])
            for route in routes
            for at, target in enumerate(route.targets)
            if target.policy and problems.get(target.backend)
        ]
        if violations:
            raise ArgumentInvalid("The route cannot be trained on.", violations=violations)

    async def _put(self, make: Callable[[], list[route_pb2.Route]]) -> list[route_pb2.Route]:
        """Publishes the routes that differ from the current ones; returns all resulting routes."""
        models: list[str] = []

        def changed() -> dict[str, bytes]:
            routes = make()
            self._require_trainable(routes)
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

        await self._writer.change(changed)
        return [self._current(model) for model in models]


def _messages(
    routes: Iterable[route_pb2.Route], *, removed: Sequence[str] = (), snapshot_complete: bool = False
) -> Iterator[route_service_pb2.WatchRoutesResponse]:
    """Yields routes, and with the last of them what else there is."""
    *before, last = list(messages_of(routes)) or [[]]
    for part in before:
        yield route_service_pb2.WatchRoutesResponse(routes=part)
    yield route_service_pb2.WatchRoutesResponse(routes=last, removed=removed, snapshot_complete=snapshot_complete)


def _not_found(model: str, models: Iterable[str]) -> RouteNotFound:
    served = ", ".join(sorted(models)) or "none"
    return RouteNotFound(f"Route routes/{model} not found. Served: {served}.", model=model, served=served)


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
        Violation(field=f"weights[{name}]", description="is not a backend of the route")
        for name in request.weights
        if name not in backends
    ] + [
        Violation(field=f"version_weights[{version}]", description="is not a policy version of the route")
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
