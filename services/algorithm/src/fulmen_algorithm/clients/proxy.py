"""The LLM proxy's administration: where the engine is, and which version it serves."""

from collections.abc import Mapping

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub
from fulmen.llm_proxy.v1.route_service_pb2_grpc import RouteServiceStub
from fulmen.rpc.channel import FulmenChannel

CALL_DEADLINE_S = 20.0
TARGET_WEIGHT = 100


class ProxyAdmin:
    """Registers the engine and its routes; every call is idempotent."""

    def __init__(self, channel: FulmenChannel, *, backend_id: str, key_name: str) -> None:
        """`key_name` names the key in the proxy's settings; empty if the engine needs none."""
        self._backends = BackendServiceStub(channel)
        self._routes = RouteServiceStub(channel)
        self._backend = f"backends/{backend_id}"
        self._key_name = key_name

    async def register(self, base_url: str) -> None:
        """Says where the engine is."""
        backend = backend_pb2.Backend(
            name=self._backend,
            base_url=base_url,
            key_name=self._key_name,
            returns_token_ids=True,
            engine=backend_pb2.ENGINE_FULMEN,
        )
        request = backend_service_pb2.RegisterBackendRequest(backend=backend)
        await self._backends.RegisterBackend(request, timeout=CALL_DEADLINE_S)

    async def put_route(self, policy: str, version: int, overrides: Mapping[str, str]) -> None:
        """Sends the policy's public model name to the engine; `overrides` are JSON fields by rollout mode."""
        route = route_pb2.Route(
            name=f"routes/{policy}",
            targets=[
                route_pb2.RouteTarget(
                    backend=self._backend, weight=TARGET_WEIGHT, policy=policy, policy_version=version
                )
            ],
            overrides=[
                route_pb2.ModeOverride(mode=mode, request_fields_json=fields) for mode, fields in overrides.items()
            ],
        )
        await self._routes.PutRoute(route_service_pb2.PutRouteRequest(route=route), timeout=CALL_DEADLINE_S)

    async def promote(self, policy: str, version: int) -> None:
        """Says which version the engine serves."""
        request = route_service_pb2.PromoteVersionRequest(policy=policy, policy_version=version)
        await self._routes.PromoteVersion(request, timeout=CALL_DEADLINE_S)
