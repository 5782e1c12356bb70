"""The composition root of the store: the one file that knows all its parts."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Final

import grpc.aio
import structlog
from pydantic import SecretStr

from fulmen.ids import ALL_PROJECTS
from fulmen.keda import externalscaler_pb2_grpc
from fulmen.store.v1 import (
    lease_service_pb2_grpc,
    peer_service_pb2_grpc,
    project_service_pb2_grpc,
    resource_service_pb2_grpc,
    rollout_service_pb2_grpc,
    runner_registry_service_pb2_grpc,
    usage_service_pb2_grpc,
)
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.server import build_server
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import Caller, OwnToken, TokenSigner, TokenVerifier, new_token_id
from fulmen_service_kit.tokens import Role as TokenRole
from fulmen_store.access_policy import ROLE_POLICY, SERVICE_NAMES
from fulmen_store.database.watch import DatabaseWatch
from fulmen_store.projects.projects import Projects
from fulmen_store.projects.tokens import Tokens
from fulmen_store.queue_parts import Queue, wire_queue
from fulmen_store.queue_parts import roles as queue_roles
from fulmen_store.replicas.membership import MembershipRenewer
from fulmen_store.replicas.peer_client import PeerClient
from fulmen_store.replicas.wakeups import PROJECTS_CHANGED
from fulmen_store.resources.resources import Resources
from fulmen_store.resources.watch import ResourceWatcher
from fulmen_store.rollouts.dead_letters import DeadLetters
from fulmen_store.rollouts.feed import FeedFollower
from fulmen_store.scheduling.queue_stats import StatsCache
from fulmen_store.scheduling.runner_streams import Drained
from fulmen_store.settings import StoreSettings
from fulmen_store.table_parts import Tables, open_tables
from fulmen_store.transport.lease_service import LeaseService
from fulmen_store.transport.peer_service import PeerService
from fulmen_store.transport.project_service import ProjectService, token_signer
from fulmen_store.transport.registry_service import RunnerRegistryService
from fulmen_store.transport.resource_service import ResourceService
from fulmen_store.transport.rollout_codec import repeated_rollout
from fulmen_store.transport.rollout_service import RolloutService
from fulmen_store.transport.scaler_service import Identify, ScalerService
from fulmen_store.transport.usage_service import UsageService
from fulmen_store.usage.sync import UsageSync

__all__ = ["build"]

DRAIN_POLL_S: Final = 0.02

_log = structlog.get_logger()


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Makes the parts of the store and wires them.

    Raises:
        DatabaseUnavailable: if PostgreSQL did not answer in time.
        MigrationError: if the schema cannot be brought up to date.
        StartupError: if the port cannot be bound.
    """
    assert isinstance(settings, StoreSettings)
    settings = _with_key(settings)
    tables = await open_tables(settings, stack)
    keys = settings.signing_keys()
    own_token = OwnToken(keys, TokenRole.SERVICE, subject="store-replica", project=ALL_PROJECTS)
    peers = PeerClient(own_token, tls=settings.sibling_tls())
    stack.push_async_callback(peers.close)
    queue = wire_queue(tables, settings, peers)
    await queue.upkeep.run_once()

    def identify(rpc: str, authorization: str, address: str) -> Caller:
        return server.authenticator.identify(rpc, authorization, address)

    verifier = TokenVerifier(keys, revoked=queue.revoked)
    server = build_server(
        settings,
        verifier=verifier,
        policy=ROLE_POLICY,
        service_names=SERVICE_NAMES,
        register=lambda grpc_server: _register(
            grpc_server, tables, queue, settings, identify=identify, signer=TokenSigner(keys), verifier=verifier
        ),
    )
    membership = MembershipRenewer(
        table=tables.replicas,
        replicas=queue.replicas,
        address=settings.peer_address(server.port),
        runner_count=lambda: len(queue.streams),
    )
    server.readiness.add("database", lambda: "" if tables.database.is_up else "it does not answer, or takes no writes")
    watch = DatabaseWatch(
        database=tables.database,
        dsn=settings.database_url.get_secret_value(),
        connections=settings.database_connections,
        changed=server.tell_readiness,
    )
    http = queue.spans.serve_http(server, settings, stack)
    roles = queue_roles(tables, queue, settings.lease_ttl_s) | queue.spans.roles()
    roles |= {"membership-renewer": membership, "database-watch": watch, "http-server": http}

    async def drain() -> None:
        await asyncio.gather(http.drain(), _drain(queue, membership))

    return ServiceParts(server=server, roles=roles, drain=drain, ports={"http_port": http.port})


def _register(
    server: grpc.aio.Server,
    tables: Tables,
    queue: Queue,
    settings: StoreSettings,
    *,
    identify: Identify,
    signer: TokenSigner,
    verifier: TokenVerifier,
) -> None:
    stopping, poll_s = queue.stopping.is_set, settings.poll_interval_s
    rollout_service = RolloutService(
        rollouts=queue.rollouts,
        table=tables.rollouts,
        lists=tables.rollout_lists,
        dead_letters=DeadLetters(
            rollouts=queue.rollouts, table=tables.rollouts, dead=tables.dead_letters, again=repeated_rollout
        ),
        feed=FeedFollower(table=tables.feed, wakeups=queue.wakeups, poll_interval_s=poll_s),
        streams=queue.streams,
        dispatcher=queue.dispatcher,
        stats=StatsCache(tables.queue_stats.stats),
        stopping=stopping,
    )
    lease_service = LeaseService(
        sessions=queue.sessions,
        streams=queue.streams,
        notes=queue.notes,
        dispatcher=queue.dispatcher,
        ends=queue.ends,
        table=tables.rollouts,
        checks=tables.attempt_checks,
        signer=signer,
        undelivered=queue.returner.give_back,
        drain_notice_s=settings.drain_notice_s,
        stopping=stopping,
    )
    resource_service = ResourceService(
        resources=Resources(table=tables.resources, wakeups=queue.wakeups),
        watcher=ResourceWatcher(table=tables.resources, wakeups=queue.wakeups, poll_interval_s=poll_s),
        table=tables.resources,
        rollouts=tables.rollouts,
        stopping=stopping,
    )
    rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(rollout_service, server)
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(lease_service, server)
    resource_service_pb2_grpc.add_ResourceServiceServicer_to_server(resource_service, server)
    queue.spans.register(server)
    peer_service_pb2_grpc.add_PeerServiceServicer_to_server(PeerService(queue.listener), server)
    registry = RunnerRegistryService(table=tables.runners, board=queue.board, demand=queue.demand, stopping=stopping)
    runner_registry_service_pb2_grpc.add_RunnerRegistryServiceServicer_to_server(registry, server)
    scaler = ScalerService(demand=queue.demand, identify=identify, stopping=stopping)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(scaler, server)
    project_service = ProjectService(
        projects=Projects(table=tables.projects, changed=lambda: queue.wakeups.announce([PROJECTS_CHANGED])),
        tokens=Tokens(
            table=tables.tokens,
            sign=token_signer(signer),
            new_id=new_token_id,
            revoked=queue.revoked.add,
        ),
        table=tables.projects,
        token_table=tables.tokens,
        verifier=verifier,
    )
    project_service_pb2_grpc.add_ProjectServiceServicer_to_server(project_service, server)
    exchange = UsageSync(table=tables.usage, project_id=tables.rollouts.project_id)
    usage_service = UsageService(exchange=exchange, table=tables.usage, rollouts=tables.rollouts)
    usage_service_pb2_grpc.add_UsageServiceServicer_to_server(usage_service, server)


async def _drain(queue: Queue, membership: MembershipRenewer) -> None:
    """Leaves the other replicas, tells watchers and runners to move, and waits until the runners have."""
    queue.stopping.set()
    queue.wakeups.announce_all()
    queue.streams.send_each([(stream.session_id, Drained()) for stream in queue.streams.all_open()])
    await membership.leave()
    while len(queue.streams):  # noqa: ASYNC110  # the lifecycle bounds the wait
        await asyncio.sleep(DRAIN_POLL_S)


def _with_key(settings: StoreSettings) -> StoreSettings:
    """Gives a store in dev mode without a key one of its own, so that attempts get keys that it accepts."""
    if settings.signing_key.get_secret_value():
        return settings
    return settings.model_copy(update={"signing_key": SecretStr(secrets.token_urlsafe(32))})
