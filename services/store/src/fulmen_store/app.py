"""The composition root of the store: creates every part, wires it, and names the background roles."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Final

import structlog
from pydantic import SecretStr

from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.permissions import SCALER
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_service_kit.settings import ServiceSettings
from fulmen_store.database.database import Database, connect
from fulmen_store.database.migrations import migrate
from fulmen_store.database.watch import DatabaseWatch
from fulmen_store.leases.table import AttemptCheckTable
from fulmen_store.replicas.membership import MembershipRenewer
from fulmen_store.replicas.table import ReplicaTable
from fulmen_store.scheduling.runner_streams import Drained
from fulmen_store.settings import StoreSettings
from fulmen_store.wiring.queue_parts import Queue
from fulmen_store.wiring.servicers import Servicers

__all__ = ["build"]

SERVICE_NAMES: Final = (
    "fulmen.store.v1.RolloutService",
    "fulmen.store.v1.QueueService",
    "fulmen.store.v1.LeaseService",
    "fulmen.store.v1.SpanService",
    "fulmen.store.v1.ResourceService",
    "fulmen.store.v1.RunnerRegistryService",
    "fulmen.store.v1.ProjectService",
    "fulmen.store.v1.PeerService",
    "fulmen.store.v1.UsageService",
    "fulmen.store.v1.ProxyService",
    "fulmen.store.v1.SecretService",
    "fulmen.store.v1.ScheduleService",
    "fulmen.store.v1.RunLeaseService",
    "fulmen.store.v1.RunHistoryService",
    "fulmen.store.v1.CallService",
    "fulmen.store.v1.AnnotationService",
    "fulmen.store.v1.AuditService",
    "fulmen.store.v1.StoredResponseService",
    "fulmen.store.v1.EffectService",
    SCALER,
    "opentelemetry.proto.collector.trace.v1.TraceService",
)
DRAIN_POLL_S: Final = 0.02

_log = structlog.get_logger()


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the store.

    Raises:
        DatabaseUnavailable: If PostgreSQL did not answer in time.
        MigrationError: If the schema cannot be brought up to date.
        StartupError: If a port cannot be bound, or the blob URL cannot be used.
    """
    assert isinstance(settings, StoreSettings)
    settings = _with_key(settings)
    database = await _open_database(settings, stack)
    keys = StoreKeys(settings.signing_keys())
    queue = Queue(database, settings, keys, stack)
    verifier = TokenVerifier(keys, revoked=queue.revoked, clock=database.clock, runs=AttemptCheckTable(database).runs)
    services = Servicers(queue, database, settings, keys=keys, verifier=verifier)
    server = build_server(
        settings,
        verifier=verifier,
        service_names=SERVICE_NAMES,
        register=services.register,
        audit_sink=services.audit_writer.note,
    )
    services.server = server
    server.readiness.add("database", lambda: "" if database.is_up else "it does not answer, or is read-only")
    http = services.serve_http(server, stack)
    membership = MembershipRenewer(
        table=ReplicaTable(database),
        replicas=queue.replicas,
        address=settings.peer_address(server.port),
        streams=queue.streams,
    )
    watch = DatabaseWatch(
        database=database,
        dsn=settings.database_url.get_secret_value(),
        connections=settings.database_connections,
        changed=server.publish_readiness,
    )
    roles = queue.roles | services.roles
    roles |= {"membership-renewer": membership, "database-watch": watch, "http-server": http}

    async def drain() -> None:
        await asyncio.gather(http.drain(), _drain(queue, membership))

    return ServiceParts(server=server, roles=roles, drain=drain, ports={"http_port": http.port})


async def _open_database(settings: StoreSettings, stack: AsyncExitStack) -> Database:
    dsn = settings.database_url.get_secret_value()
    database = await connect(
        dsn,
        connections=settings.database_connections,
        start_limit_s=settings.database_start_limit_s,
        standby_dsn=settings.standby_url.get_secret_value(),
    )
    stack.push_async_callback(database.close)
    if settings.auto_migrate:
        migrated = await migrate(dsn)
        _log.info(
            "schema_ready", applied=migrated.applied, waiting_for_post=migrated.waiting, caught_up=migrated.caught_up
        )
    return database


async def _drain(queue: Queue, membership: MembershipRenewer) -> None:
    """Leaves the other replicas, sends drain notices to watchers and runners, and waits until the runners have left."""
    queue.stopping.set()
    queue.wakeups.announce_all()
    queue.feed_watch.wake_all()
    queue.streams.send_each([(stream.session_id, Drained()) for stream in queue.streams.all_open()])
    await membership.leave()
    while len(queue.streams):  # noqa: ASYNC110  # the lifecycle bounds the wait
        await asyncio.sleep(DRAIN_POLL_S)


def _with_key(settings: StoreSettings) -> StoreSettings:
    """Gives a store in dev mode without a signing key one of its own, so that it accepts the attempt keys it issues."""
    if settings.signing_key.get_secret_value():
        return settings
    return settings.model_copy(update={"signing_key": SecretStr(secrets.token_urlsafe(32))})
