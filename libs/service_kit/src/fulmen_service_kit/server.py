"""Makes the gRPC server of a service: the edge, health, reflection, limits and keep-alive."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fulmen_service_kit.auth import Authenticator, RolePolicy
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.rpc_edge import RpcEdge
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import TokenVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcServer:
    """A server that is bound, its health, and who may call it."""

    server: grpc.aio.Server
    authenticator: Authenticator
    health: health.aio.HealthServicer
    port: int
    service_names: tuple[str, ...]

    async def set_serving(self, serving: bool) -> None:
        """Tells probes whether the service takes calls."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, status)


def build_server(
    settings: ServiceSettings,
    *,
    policy: RolePolicy,
    service_names: Sequence[str],
    register: Callable[[grpc.aio.Server], None],
    revoked: Container[str] = frozenset(),
    log_error_texts: bool = True,
    private: Path | None = None,
) -> RpcServer:
    """Makes and binds a server; `lifecycle.run_service` starts it.

    Args:
        settings: Host, port, keys and limits.
        policy: Which roles may call which rpc.
        service_names: Full names of the served services, for health and reflection.
        register: Adds the servicers.
        revoked: Ids of tokens that are refused although they are well signed; may change at any time.
        log_error_texts: See `RpcEdge`.
        private: A socket on which the service's own processes reach this one; the port is then shared with them.

    Raises:
        StartupError: If the port cannot be bound.
    """
    verifier = TokenVerifier(settings.signing_key.get_secret_value(), revoked=revoked)
    authenticator = Authenticator(verifier=verifier, policy=policy, dev_mode=settings.dev_mode)
    edge = RpcEdge(authenticator, log_error_texts=log_error_texts)
    server = grpc.aio.server(
        interceptors=[edge],
        options=(
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_send_message_length", settings.max_message_bytes),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0 if private is None else 1),
        ),
    )
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    # Imported where a server is made: commands that serve nothing do without.
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = f"{settings.host}:{settings.port}"
    try:
        port = server.add_insecure_port(address)
        if private is not None:
            private.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{private}")
    except RuntimeError:
        raise StartupError(f"Cannot listen on {address}: the port is in use or not allowed. Choose another.") from None
    return RpcServer(
        server=server,
        authenticator=authenticator,
        health=health_servicer,
        port=port,
        service_names=tuple(service_names),
    )
