"""fulmen.llm_proxy.v1.BackendService."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc.aio

from fulmen.errors import (
    ArgumentInvalid,
    BackendInUse,
    BackendNotFound,
    DeadlineExceeded,
    RouteExists,
    Unavailable,
    Violation,
)
from fulmen.kinds import policy_problem
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, backend_service_pb2_grpc
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.breaker import BreakerState
from fulmen_llm_proxy.routing.codec import (
    ROUTE_KIND,
    backend_id_of,
    backend_resource,
    decode_backend,
    parse_backend,
    parse_route,
)
from fulmen_llm_proxy.routing.owned_file import require_unowned
from fulmen_llm_proxy.routing.resources import ResourceCache, ResourceWriter
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.transport.paging import page_of
from fulmen_llm_proxy.transport.views import Views
from fulmen_llm_proxy.workers.siblings import Siblings, combined_instance

_BREAKERS = {
    BreakerState.CLOSED: backend_pb2.BREAKER_STATE_CLOSED,
    BreakerState.OPEN: backend_pb2.BREAKER_STATE_OPEN,
    BreakerState.HALF_OPEN: backend_pb2.BREAKER_STATE_HALF_OPEN,
}
_DEFAULT_HOLD_S = 60.0
_MAX_HOLD_S = 600.0
_NS_PER_S = 1_000_000_000
_SIBLINGS_TIMEOUT_S = 5.0


class BackendServicer(backend_service_pb2_grpc.BackendServiceServicer):
    """Changes backends in the store; reads them from this replica's table."""

    def __init__(
        self,
        *,
        resources: ResourceCache,
        tables: TableHolder,
        writer: ResourceWriter,
        views: Views,
        states: BackendStates,
        instance_id: str,
        siblings: Siblings | None = None,
    ) -> None:
        """Initializes the servicer.

        Args:
            views: what callers see of backends.
            siblings: the other workers behind the same port; None with a single process.
        """
        self._resources = resources
        self._tables = tables
        self._writer = writer
        self._views = views
        self._states = states
        self._instance_id = instance_id
        self._siblings = siblings

    async def RegisterBackend(
        self, request: backend_service_pb2.RegisterBackendRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.RegisterBackendResponse:
        """Adds or replaces a backend."""
        await self._tables.loaded()
        decode_backend(request.backend)
        for output in ("stale_version", "file"):
            request.backend.ClearField(output)
        backend_id = backend_id_of(request.backend.name)
        async with self._writer.changing:
            backend = await self._put(backend_id, lambda: self._owned(request.backend, backend_id))
        return backend_service_pb2.RegisterBackendResponse(backend=backend)

    async def ListBackends(
        self, request: backend_service_pb2.ListBackendsRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.ListBackendsResponse:
        """Lists backends that the caller sees, by name."""
        await self._tables.loaded()
        backends, token = page_of(
            [(backend.name, backend) for backend in self._views.backends()],
            page_size=request.page_size,
            page_token=request.page_token,
        )
        return backend_service_pb2.ListBackendsResponse(backends=backends, next_page_token=token)

    async def DrainBackend(
        self, request: backend_service_pb2.DrainBackendRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.DrainBackendResponse:
        """Stops sending new calls to a backend."""
        backend = await self._set_draining(request.name, draining=True)
        return backend_service_pb2.DrainBackendResponse(backend=backend)

    async def HoldBackend(
        self, request: backend_service_pb2.HoldBackendRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.HoldBackendResponse:
        """Holds new calls for a backend in the proxy."""
        backend_id = backend_id_of(request.name)
        ttl_s = request.ttl.ToNanoseconds() / _NS_PER_S if request.HasField("ttl") else _DEFAULT_HOLD_S
        if not 0 < ttl_s <= _MAX_HOLD_S:
            problem = Violation(field="ttl", description=f"must be greater than 0 s and at most {_MAX_HOLD_S:.0f} s")
            raise ArgumentInvalid("The request is malformed.", violations=[problem])

        def held() -> backend_pb2.Backend:
            backend = self._current(backend_id)
            backend.hold_until_time.FromNanoseconds(int((self._states.wall_clock() + ttl_s) * _NS_PER_S))
            return backend

        async with self._writer.changing:
            backend = await self._put(backend_id, held)
        return backend_service_pb2.HoldBackendResponse(backend=backend)

    async def ReleaseBackend(
        self, request: backend_service_pb2.ReleaseBackendRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.ReleaseBackendResponse:
        """Ends a hold."""
        backend_id = backend_id_of(request.name)

        def released() -> backend_pb2.Backend:
            backend = self._current(backend_id)
            backend.ClearField("hold_until_time")
            return backend

        async with self._writer.changing:
            backend = await self._put(backend_id, released)
        return backend_service_pb2.ReleaseBackendResponse(backend=backend)

    async def ResumeBackend(
        self, request: backend_service_pb2.ResumeBackendRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.ResumeBackendResponse:
        """Reverts a drain."""
        backend = await self._set_draining(request.name, draining=False)
        return backend_service_pb2.ResumeBackendResponse(backend=backend)

    async def DeleteBackend(
        self, request: backend_service_pb2.DeleteBackendRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.DeleteBackendResponse:
        """Deletes a backend that no route names."""
        backend_id = backend_id_of(request.name)

        def removed() -> dict[str, bytes]:
            require_unowned(self._current(backend_id))
            for document in self._resources.of_kind(ROUTE_KIND).values():
                route = parse_route(document.content)
                if any(target.backend == request.name for target in route.targets):
                    raise BackendInUse(f"The backend is in use by {route.name}.", route=route.name)
            return {backend_resource(backend_id): b""}

        with suppress(BackendNotFound):
            async with self._writer.changing:
                await self._writer.change(removed)
        return backend_service_pb2.DeleteBackendResponse()

    async def GetBackendHealth(
        self, request: backend_service_pb2.GetBackendHealthRequest, _: grpc.aio.ServicerContext
    ) -> backend_service_pb2.GetBackendHealthResponse:
        """Returns the health of backends that the caller sees, by all workers together."""
        known = self._views.seen_backends(sorted(self._tables.current.backends))
        own = backend_service_pb2.GetBackendHealthResponse(
            backends=[self._health(backend_id) for backend_id in known], instance_id=self._instance_id
        )
        if self._siblings is None or request.this_process_only:
            return own
        try:
            others = await self._siblings.health(timeout_s=_SIBLINGS_TIMEOUT_S)
        except DeadlineExceeded:
            raise Unavailable("A worker of the proxy is restarting; try again.") from None
        together = combined_health([own, *others])
        ids = [each.name.removeprefix("backends/") for each in together.backends]
        hidden = set(ids).difference(self._views.seen_backends(ids))
        for each in [each for each in together.backends if each.name.removeprefix("backends/") in hidden]:
            together.backends.remove(each)
        return together

    def _health(self, backend_id: str) -> backend_pb2.BackendHealth:
        state = self._states.of(backend_id)
        health = backend_pb2.BackendHealth(
            name=f"backends/{backend_id}",
            healthy=self._states.is_healthy(backend_id),
            in_flight_count=state.in_flight,
            request_count=state.requests,
            failure_count=state.failures,
            waiting_count=state.waiting,
            breaker=_BREAKERS[state.breaker.state],
            last_failure_kind=state.last_failure_kind,
            engine_waiting_count=state.engine_waiting,
            engine_cache_usage=state.engine_cache_usage,
            stale_version=self._tables.current.backends[backend_id].stale_version,
        )
        if state.last_failure_s is not None:
            health.last_failure_time.FromNanoseconds(int(state.last_failure_s * 1e9))
        return health

    def _current(self, backend_id: str) -> backend_pb2.Backend:
        self._tables.require_loaded()
        document = self._resources.find(backend_resource(backend_id))
        if document is None:
            name = f"backends/{backend_id}"
            raise BackendNotFound(f"Backend {name} not found.", backend=name)
        return parse_backend(document.content)

    def _owned(self, wanted: backend_pb2.Backend, backend_id: str) -> backend_pb2.Backend:
        """Returns a wanted backend; one without a project, an operator's, has that of the present backend.

        Raises:
            RouteExists: if it has a project, and the present backend is not that project's: routes that lead there would lead
                to another project's weights.
            ManagedByFile: if a file owns the present backend.
            ArgumentInvalid: if a target at it serves a policy, which it then could not.
        """
        self._require_no_policy(wanted)
        present = self._resources.find(backend_resource(backend_id))
        if present is None:
            return wanted
        held = parse_backend(present.content)
        if wanted.project not in ("", held.project):
            raise RouteExists(f"The backend '{backend_id}' is in use outside {wanted.project}.", model=backend_id)
        require_unowned(held)
        owned = backend_pb2.Backend()
        owned.CopyFrom(wanted)
        owned.project = held.project
        return owned

    def _require_no_policy(self, wanted: backend_pb2.Backend) -> None:
        problem = policy_problem(wanted)
        for document in self._resources.of_kind(ROUTE_KIND).values() if problem else ():
            route = parse_route(document.content)
            if policies := [each.policy for each in route.targets if each.backend == wanted.name and each.policy]:
                text = f"the policy {policies[0]!r} of {route.name} {problem}"
                violation = Violation(field="backend.dialect", description=text)
                raise ArgumentInvalid("The request is malformed.", violations=[violation])

    async def _set_draining(self, name: str, *, draining: bool) -> backend_pb2.Backend:
        backend_id = backend_id_of(name)

        def changed() -> backend_pb2.Backend:
            backend = self._current(backend_id)
            backend.draining = draining
            return backend

        async with self._writer.changing:
            return await self._put(backend_id, changed)

    async def _put(self, backend_id: str, make: Callable[[], backend_pb2.Backend]) -> backend_pb2.Backend:
        """Publishes the backend if it differs from the current one; returns the resulting backend."""
        resource_id = backend_resource(backend_id)

        def changed() -> dict[str, bytes]:
            backend = make()
            held = self._resources.find(resource_id)
            if held is not None and parse_backend(held.content) == backend:
                return {}
            return {resource_id: backend.SerializeToString(deterministic=True)}

        await self._writer.change(changed)
        return self._current(backend_id)


_BY_URGENCY = (
    backend_pb2.BREAKER_STATE_CLOSED,
    backend_pb2.BREAKER_STATE_HALF_OPEN,
    backend_pb2.BREAKER_STATE_OPEN,
)


def combined_health(
    answers: Sequence[backend_service_pb2.GetBackendHealthResponse],
) -> backend_service_pb2.GetBackendHealthResponse:
    """Merges the workers' health of each backend; a worker may not know a new backend yet."""
    seen: dict[str, list[backend_pb2.BackendHealth]] = {}
    for answer in answers:
        for health in answer.backends:
            seen.setdefault(health.name, []).append(health)
    own, *others = (answer.instance_id for answer in answers)
    return backend_service_pb2.GetBackendHealthResponse(
        backends=[_combined(seen[name]) for name in sorted(seen)], instance_id=combined_instance(own, others)
    )


def _combined(parts: Sequence[backend_pb2.BackendHealth]) -> backend_pb2.BackendHealth:
    combined = backend_pb2.BackendHealth(
        name=parts[0].name,
        healthy=all(part.healthy for part in parts),
        in_flight_count=sum(part.in_flight_count for part in parts),
        request_count=sum(part.request_count for part in parts),
        failure_count=sum(part.failure_count for part in parts),
        breaker=max((part.breaker for part in parts), key=_BY_URGENCY.index),
        waiting_count=sum(part.waiting_count for part in parts),
        engine_waiting_count=max(part.engine_waiting_count for part in parts),
        engine_cache_usage=max(part.engine_cache_usage for part in parts),
        stale_version=max(part.stale_version for part in parts),
    )
    failed = [part for part in parts if part.HasField("last_failure_time")]
    if failed:
        last = max(failed, key=lambda part: part.last_failure_time.ToNanoseconds())
        combined.last_failure_time.CopyFrom(last.last_failure_time)
        combined.last_failure_kind = last.last_failure_kind
    return combined
