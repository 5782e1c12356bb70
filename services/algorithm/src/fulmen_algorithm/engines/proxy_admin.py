"""The LLM proxy's administration: the addresses of a policy's engines and the version that each serves."""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from fulmen.errors import BackendInUse, RouteNotFound
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub
from fulmen.llm_proxy.v1.route_service_pb2_grpc import RouteServiceStub
from fulmen.rpc.channel import FulmenChannel
from fulmen_algorithm.clients.patience import Patience
from fulmen_algorithm.engines.engine import EngineAddress, EngineKind
from fulmen_algorithm.policy.served import ServedPolicy
from fulmen_algorithm.runs.ports import PublishedPolicy

CALL_DEADLINE_S = 20.0
TARGET_WEIGHT = 100
MAX_BACKEND_ID = 63
DIGEST_LENGTH = 12
_ENGINES = {EngineKind.FULMEN: backend_pb2.ENGINE_FULMEN, EngineKind.VLLM: backend_pb2.ENGINE_VLLM}


def backend_id(prefix: str, policy: str, index: int = 0) -> str:
    """Returns the backend id of one of a policy's engines: unique and of limited length."""
    # No policy gives the id of another's second engine: after the prefix comes a point, not a hyphen.
    name = f"{prefix}.{index}-{policy}" if index else f"{prefix}-{policy}"
    if len(name) <= MAX_BACKEND_ID:
        return name
    digest = hashlib.sha256(policy.encode()).hexdigest()[:DIGEST_LENGTH]
    return f"{name[: MAX_BACKEND_ID - DIGEST_LENGTH - 1]}-{digest}"


@dataclass(frozen=True, slots=True)
class _Target:
    """An engine that serves a policy: the version that it has confirmed, and its own name for the policy if it has one."""

    version: int
    model: str


class PolicyRoutes:
    """The routes of a policy. Their targets are its engines, each with the version that it has confirmed.

    Every call is idempotent. Changes are serialised, so that none is lost when engines change at the same time.
    """

    def __init__(self, channel: FulmenChannel, *, project: str) -> None:
        """Initializes the client; the callers of the project alone may use the routes."""
        self.project = project
        self._backends = BackendServiceStub(channel)
        self._routes = RouteServiceStub(channel)
        self._targets: dict[str, _Target] = {}
        """By the backend's name."""
        self._changing = asyncio.Lock()

    async def join(self, served: ServedPolicy, *, backend: str, version: int, model: str) -> None:
        """Sends the public model names of a policy also to an engine that is registered.

        Args:
            served: The policy.
            backend: Name of the engine's backend.
            version: The version that the engine serves.
            model: The engine's own name for the policy; empty if it is the same.

        Raises:
            RouteExists: if a name is in use outside the project.
        """
        async with self._changing:
            self._targets[backend] = _Target(version, model)
            await self._put(served)

    async def leave(self, served: ServedPolicy, *, backend: str) -> None:
        """Sends no more calls to an engine, unless it is the only one; calls in flight continue."""
        async with self._changing:
            if self._targets.pop(backend, None) is not None and self._targets:
                await self._put(served)

    async def promote(self, policy: PublishedPolicy, *, backend: str) -> None:
        """Sets the version that an engine serves.

        Raises:
            RouteNotFound: if the proxy has no route of the policy to the engine.
        """
        request = route_service_pb2.PromoteVersionRequest(
            policy=policy.policy, policy_version=policy.version, backend=backend
        )
        async with self._changing:
            if (target := self._targets.get(backend)) is not None:
                self._targets[backend] = replace(target, version=policy.version)
        # All engines of a policy at the same time: a route that is put from now on has the new version.
        await self._routes.PromoteVersion(request, timeout=CALL_DEADLINE_S)

    async def withdraw(self, name: str) -> None:
        """Deletes the route of a public model name."""
        await self._routes.DeleteRoute(
            route_service_pb2.DeleteRouteRequest(name=f"routes/{name}"), timeout=CALL_DEADLINE_S
        )

    async def is_taken(self, name: str) -> bool:
        """Returns True if a public model name is in use outside the project."""
        request = route_service_pb2.GetRouteRequest(name=f"routes/{name}")
        try:
            answer = await self._routes.GetRoute(request, timeout=CALL_DEADLINE_S)
        except RouteNotFound:
            return False
        return bool(answer.route.project != self.project)

    async def _put(self, served: ServedPolicy) -> None:
        policy = served.policy
        for name in policy.model_names:
            route = route_pb2.Route(
                name=f"routes/{name}",
                project=self.project,
                targets=[
                    route_pb2.RouteTarget(
                        backend=backend,
                        # Adapters of roles have the same name everywhere.
                        backend_model=target.model if name == policy.policy else "",
                        weight=TARGET_WEIGHT,
                        policy=policy.policy,
                        policy_version=target.version,
                    )
                    for backend, target in sorted(self._targets.items())
                ],
                overrides=[
                    route_pb2.ModeOverride(mode=mode, request_fields_json=fields)
                    for mode, fields in served.overrides.items()
                ],
            )
            if len(self._targets) > 1:
                # An attempt keeps the engine that has its conversation (docs/decisions/0040-attempts-have-seats-at-engines.md).
                route.balancing = route_pb2.BALANCING_STICKY
                route.rolling_versions = True
            await self._routes.PutRoute(route_service_pb2.PutRouteRequest(route=route), timeout=CALL_DEADLINE_S)


class ProxyAdmin:
    """Registers one engine and its part of the policy's routes; every call is idempotent.

    Attributes:
        backend: Name of the engine's backend.
    """

    def __init__(self, channel: FulmenChannel, *, backend_id: str, routes: PolicyRoutes) -> None:
        """Initializes the client.

        Args:
            channel: The LLM proxy.
            backend_id: Id of the engine's backend.
            routes: The routes of the engine's policy.
        """
        self.backend = f"backends/{backend_id}"
        self._routes = routes
        self._backends = BackendServiceStub(channel)

    async def register(self, engine: EngineAddress) -> None:
        """Registers the address of the engine; releases a hold left from an earlier swap."""
        backend = backend_pb2.Backend(
            name=self.backend,
            project=self._routes.project,
            base_url=engine.base_url,
            key_name=engine.key_name,
            returns_token_ids=True,
            engine=_ENGINES[engine.kind],
        )
        request = backend_service_pb2.RegisterBackendRequest(backend=backend)
        await self._backends.RegisterBackend(request, timeout=CALL_DEADLINE_S)

    async def put_routes(self, served: ServedPolicy, *, version: int, engine_model: str) -> None:
        """Sends the policy's model names to the engine; see `PolicyRoutes.join`."""
        await self._routes.join(served, backend=self.backend, version=version, model=engine_model)

    async def leave_routes(self, served: ServedPolicy) -> None:
        """Sends no more calls to the engine; see `PolicyRoutes.leave`."""
        await self._routes.leave(served, backend=self.backend)

    async def unregister(self) -> None:
        """Deletes the backend, unless a route uses it."""
        with suppress(BackendInUse):
            await self._backends.DeleteBackend(
                backend_service_pb2.DeleteBackendRequest(name=self.backend), timeout=CALL_DEADLINE_S
            )

    async def promote(self, policy: PublishedPolicy) -> None:
        """Sets the version that the engine serves."""
        await self._routes.promote(policy, backend=self.backend)

    async def hold(self, ttl_s: float) -> None:
        """Holds new calls for the engine in the proxy, for at most `ttl_s`; with other engines, they get them."""
        request = backend_service_pb2.HoldBackendRequest(name=self.backend, ttl=timedelta(seconds=ttl_s))
        await self._backends.HoldBackend(request, timeout=CALL_DEADLINE_S)

    async def release(self) -> None:
        """Ends a hold."""
        request = backend_service_pb2.ReleaseBackendRequest(name=self.backend)
        await self._backends.ReleaseBackend(request, timeout=CALL_DEADLINE_S)

    async def in_flight_count(self) -> int:
        """Returns the number of calls that this proxy replica has at the engine."""
        return sum(health.in_flight_count for health in await self._health())

    async def stale_version(self) -> int:
        """Returns the version of an answer of the engine that was older than its target's; 0 if there was none."""
        return max((health.stale_version for health in await self._health(own_process=True)), default=0)

    async def _health(self, *, own_process: bool = False) -> Sequence[backend_pb2.BackendHealth]:
        request = backend_service_pb2.GetBackendHealthRequest(this_process_only=own_process)
        answer = await self._backends.GetBackendHealth(request, timeout=CALL_DEADLINE_S)
        return [health for health in answer.backends if health.name == self.backend]


ASK_AGAIN_S = 0.05


class ProxyGate:
    """The gate of one swap; see `engines.engine.SwapGate`."""

    def __init__(self, proxy: ProxyAdmin, policy: PublishedPolicy, patience: Patience) -> None:
        """The proxy must have routes to the engine."""
        self._proxy = proxy
        self._policy = policy
        self._patience = patience

    async def hold(self, ttl_s: float) -> None:
        """Holds new calls in the proxy, for at most `ttl_s`."""
        await self._patience.call(lambda: self._proxy.hold(ttl_s))

    async def idle(self, limit_s: float) -> bool:
        """Waits until the proxy has no call at the engine; False on timeout."""
        try:
            async with asyncio.timeout(limit_s):
                while await self._patience.call(self._proxy.in_flight_count):  # noqa: ASYNC110 - no event to wait for
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            return False
        return True

    async def promote(self) -> None:
        """Starts attributing tokens to the new version."""
        policy = self._policy
        await self._patience.call(lambda: self._proxy.promote(policy))

    async def release(self) -> None:
        """Releases held calls to the engine."""
        await self._patience.call(self._proxy.release)


class RoutingGate(ProxyGate):
    """The gate of a swap where the proxy's routes may be missing, such as after a restart of the service."""

    def __init__(self, proxy: ProxyAdmin, served: ServedPolicy, patience: Patience, *, engine_model: str) -> None:
        super().__init__(proxy, served.policy, patience)
        self._served = served
        self._engine_model = engine_model

    async def promote(self) -> None:
        """Sends the policy's model names to the engine, under the new version."""
        served, model = self._served, self._engine_model
        version = served.policy.version
        await self._patience.call(lambda: self._proxy.put_routes(served, version=version, engine_model=model))


class AttachGate(ProxyGate):
    """The gate of an engine that is attached: it is not registered at the proxy, but may have calls in flight."""

    async def hold(self, ttl_s: float) -> None:
        """Does nothing."""

    async def idle(self, limit_s: float) -> bool:
        """Always idle."""
        return True

    async def promote(self) -> None:
        """Starts attributing tokens to the new version, if the proxy has routes of the policy."""
        with suppress(RouteNotFound):
            await super().promote()

    async def release(self) -> None:
        """Does nothing."""
