"""The gRPC server of a service: edge, health, reflection, limits and keep-alive."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fulmen.ids import ALL_PROJECTS
from fulmen.rpc.tls import TlsFiles
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.readiness import Readiness
from fulmen_service_kit.rpc.edge import RpcEdge
from fulmen_service_kit.security.audit import AuditLog, Sink
from fulmen_service_kit.security.auth import Authenticator, Verifier
from fulmen_service_kit.security.permissions import RULES
from fulmen_service_kit.security.project_limits import ProjectLimits
from fulmen_service_kit.security.tls import rpc_credentials
from fulmen_service_kit.security.token_buckets import TokenBuckets
from fulmen_service_kit.security.tokens import Caller
from fulmen_service_kit.settings import ServiceSettings

POLL_INTERVAL_S = 0.5
CONNECTION_STREAMS = 8192
"""Calls and streams of one connection at the same time; gRPC has no limit of its own. More wait at the client. More than a project
may have: `project_max_calls` and `project_max_streams`."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcServer:
    """A bound server with its health and authenticator.

    gRPC health by name: the empty name (liveness) is SERVING from start to stop, since a restart does not help when a
    dependency is unavailable; the package, such as `fulmen.store.v1`, and each of its services follow the readiness.
    """

    server: grpc.aio.Server
    authenticator: Authenticator
    limits: ProjectLimits
    health: health.aio.HealthServicer
    port: int
    package: str
    service_names: tuple[str, ...]
    readiness: Readiness = field(default_factory=Readiness)

    async def identify(self, rpc: str, authorization: str, address: str) -> Caller:
        """Authenticates, counts and authorizes a call whose servicer reads the token from its request.

        Raises:
            FulmenError: If the call is rejected.
        """
        caller = await self.authenticator.identify(authorization, address)
        with await self.limits.admit(caller):
            self.authenticator.authorize(rpc, caller)
        return caller

    async def set_serving(self, serving: bool) -> None:
        """Sets whether the service accepts calls."""
        self.readiness.add("service", lambda: "" if serving else "stopping")
        await self.health.set("", _SERVING if serving else _NOT_SERVING)
        await self.publish_readiness()

    async def publish_readiness(self) -> None:
        """Publishes the current readiness to gRPC health."""
        ready, _ = self.readiness.report()
        for name in (self.package, *self.service_names):
            await self.health.set(name, _SERVING if ready else _NOT_SERVING)

    async def follow_readiness(self) -> None:
        """Publishes changes of the readiness until cancelled."""
        published = None
        while True:
            ready, _ = self.readiness.report()
            if ready is not published:
                published = ready
                await self.publish_readiness()
            await asyncio.sleep(POLL_INTERVAL_S)


def build_server(
    settings: ServiceSettings,
    *,
    verifier: Verifier,
    project: str = ALL_PROJECTS,
    service_names: Sequence[str],
    register: Callable[[grpc.aio.Server], None],
    log_error_texts: bool = True,
    private: Path | None = None,
    limits: ProjectLimits | None = None,
    audit_sink: Sink | None = None,
) -> RpcServer:
    """Creates and binds a server; `lifecycle.run_service` starts it.

    Args:
        settings: Host, port, certificates and limits.
        verifier: Verifies tokens.
        project: Project that the service serves; by default all.
        service_names: Full names of the services, for health and reflection.
        register: Adds the servicers.
        log_error_texts: See `RpcEdge`.
        private: Unix socket for the service's other processes, with which the port is then shared.
        limits: Limits of each project, which another port shares; by default those of the settings.
        audit_sink: Gets the lines of the audit log, too.

    Raises:
        StartupError: If the port cannot be bound or a configured file is unusable.
    """
    failures = TokenBuckets.per_minute(settings.auth_failures_per_minute)
    authenticator = Authenticator(verifier=verifier, dev_mode=settings.dev_mode, project=project, failures=failures)
    limits = ProjectLimits.configured(settings) if limits is None else limits
    edge = RpcEdge(
        authenticator,
        log_error_texts=log_error_texts,
        audit=_audit_log(settings, service_names, audit_sink),
        mutual_tls=bool(settings.tls_client_ca_file),
        limits=limits,
        write_timeout_s=settings.stream_write_timeout_s,
    )
    server = grpc.aio.server(
        interceptors=[edge],
        options=_options(settings, shared=private is not None),
    )
    # Registered, each rpc has a queue of its own: a flood of one does not delay the start of another.
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    # Deferred: not needed by commands that serve nothing.
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, settings.host, settings.port, settings.own_tls())
    if settings.agents_port:
        _bind(server, settings.host, settings.agents_port, replace(settings.own_tls() or TlsFiles(), ca_file=""))
    if private is not None:
        _bind_socket(server, private)
    bound = RpcServer(
        server=server,
        authenticator=authenticator,
        limits=limits,
        health=health_servicer,
        port=port,
        package=f"fulmen.{settings.service_name}.v1",
        service_names=tuple(service_names),
    )
    bound.readiness.add("service", lambda: "starting")
    return bound


def _options(settings: ServiceSettings, *, shared: bool) -> list[tuple[str, int]]:
    """Returns gRPC's options: limits and keep-alive; `shared` if other processes bind the same port."""
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_sent_bytes),
        ("grpc.max_concurrent_streams", CONNECTION_STREAMS),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(shared)),
    ]


def _bind(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None) -> int:
    address = f"{host}:{port}"
    credentials = None if tls is None else rpc_credentials(tls)
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError:
        raise StartupError(
            f"cannot listen on {address}: port is in use or not permitted. Choose another port."
        ) from None


def _bind_socket(server: grpc.aio.Server, path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        raise StartupError(f"cannot listen on {path}") from None


def _audit_log(settings: ServiceSettings, service_names: Sequence[str], sink: Sink | None) -> AuditLog:
    prefixes = tuple(f"/{name}/" for name in service_names)
    rpcs = [rpc for rpc, rule in RULES.items() if rule.audited is not None and rpc.startswith(prefixes)]
    try:
        return AuditLog(settings.audit_file, service=settings.service_name, rpcs=rpcs, also=sink)
    except OSError as error:
        raise StartupError(f"audit_file {settings.audit_file} cannot be written: {error.strerror}") from None
