"""The LLM proxy's administration: the engine's address and the version that it serves."""

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
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


def backend_id(prefix: str, policy: str) -> str:
    """Returns the backend id of a policy's engine: unique by policy and of limited length."""
    name = f"{prefix}-{policy}"
    if len(name) <= MAX_BACKEND_ID:
        return name
    digest = hashlib.sha256(policy.encode()).hexdigest()[:DIGEST_LENGTH]
    return f"{name[: MAX_BACKEND_ID - DIGEST_LENGTH - 1]}-{digest}"


class ProxyAdmin:
    """Registers the engine and its routes; every call is idempotent."""

    def __init__(self, channel: FulmenChannel, *, backend_id: str, project: str) -> None:
        """Initializes the client.

        Args:
            channel: The LLM proxy.
            backend_id: Id of the engine's backend.
            project: Project of the policy: its callers alone may use the routes.
        """
        self._project = project
        self._backends = BackendServiceStub(channel)
        self._routes = RouteServiceStub(channel)
        self._backend = f"backends/{backend_id}"

    async def register(self, engine: EngineAddress) -> None:
        """Registers the address of the engine; releases a hold left from an earlier swap."""
        backend = backend_pb2.Backend(
            name=self._backend,
            project=self._project,
            base_url=engine.base_url,
            key_name=engine.key_name,
            returns_token_ids=True,
            engine=_ENGINES[engine.kind],
        )
        request = backend_service_pb2.RegisterBackendRequest(backend=backend)
        await self._backends.RegisterBackend(request, timeout=CALL_DEADLINE_S)

    async def put_route(
        self, policy: str, version: int, overrides: Mapping[str, str], *, name: str = "", model: str = ""
    ) -> None:
        """Sends a public model name to the engine.

        Args:
            policy: The policy.
            version: The version that the engine serves.
            overrides: JSON fields by rollout mode.
            name: The public model name; empty if it is the policy's.
            model: The engine's own name for it; empty if it is the same.

        Raises:
            RouteExists: if the name is in use outside the project.
        """
        route = route_pb2.Route(
            name=f"routes/{name or policy}",
            project=self._project,
            targets=[
                route_pb2.RouteTarget(
                    backend=self._backend,
                    backend_model=model,
                    weight=TARGET_WEIGHT,
                    policy=policy,
                    policy_version=version,
                )
            ],
            overrides=[
                route_pb2.ModeOverride(mode=mode, request_fields_json=fields) for mode, fields in overrides.items()
            ],
        )
        await self._routes.PutRoute(route_service_pb2.PutRouteRequest(route=route), timeout=CALL_DEADLINE_S)

    async def put_routes(self, served: ServedPolicy, *, engine_model: str) -> None:
        """Sends the public model names of a policy to the engine; `engine_model` is the engine's name for the policy."""
        policy = served.policy
        for name in policy.model_names:
            # Adapters of roles have the same name everywhere.
            model = engine_model if name == policy.policy else ""
            await self.put_route(policy.policy, policy.version, served.overrides, name=name, model=model)

    async def withdraw(self, name: str) -> None:
        """Deletes the route of a public model name, and the backend unless another route uses it."""
        await self._routes.DeleteRoute(
            route_service_pb2.DeleteRouteRequest(name=f"routes/{name}"), timeout=CALL_DEADLINE_S
        )
        with suppress(BackendInUse):
            await self._backends.DeleteBackend(
                backend_service_pb2.DeleteBackendRequest(name=self._backend), timeout=CALL_DEADLINE_S
            )

    async def promote(self, policy: str, version: int) -> None:
        """Sets the version that the engine serves."""
        request = route_service_pb2.PromoteVersionRequest(policy=policy, policy_version=version, backend=self._backend)
        await self._routes.PromoteVersion(request, timeout=CALL_DEADLINE_S)

    async def hold(self, ttl_s: float) -> None:
        """Holds new calls for the engine in the proxy, for at most `ttl_s`."""
        request = backend_service_pb2.HoldBackendRequest(name=self._backend, ttl=timedelta(seconds=ttl_s))
        await self._backends.HoldBackend(request, timeout=CALL_DEADLINE_S)

    async def release(self) -> None:
        """Ends a hold."""
        request = backend_service_pb2.ReleaseBackendRequest(name=self._backend)
        await self._backends.ReleaseBackend(request, timeout=CALL_DEADLINE_S)

    async def in_flight_count(self) -> int:
        """Returns the number of calls that this proxy replica has at the engine."""
        request = backend_service_pb2.GetBackendHealthRequest()
        answer = await self._backends.GetBackendHealth(request, timeout=CALL_DEADLINE_S)
        return sum(health.in_flight_count for health in answer.backends if health.name == self._backend)

    async def is_taken(self, name: str) -> bool:
        """Returns True if a public model name is in use outside the project."""
        request = route_service_pb2.GetRouteRequest(name=f"routes/{name}")
        try:
            answer = await self._routes.GetRoute(request, timeout=CALL_DEADLINE_S)
        except RouteNotFound:
            return False
        return bool(answer.route.project != self._project)


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
        await self._patience.call(lambda: self._proxy.promote(policy.policy, policy.version))

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
        await self._patience.call(lambda: self._proxy.put_routes(self._served, engine_model=self._engine_model))


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
