"""The composition root of the store: the one file that knows all its parts."""

from __future__ import annotations

import asyncio
import datetime
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import grpc.aio
import structlog
from pydantic import SecretStr

from fulmen.ids import ALL_PROJECTS, uuid7, uuid7s
from fulmen.store.v1 import (
    lease_service_pb2_grpc,
    peer_service_pb2_grpc,
    project_service_pb2_grpc,
    resource_service_pb2_grpc,
    rollout_service_pb2_grpc,
    runner_registry_service_pb2_grpc,
)
from fulmen_service_kit.lifecycle import Role, ServiceParts
from fulmen_service_kit.revocation import RevocationFollower, RevokedTokens
from fulmen_service_kit.server import build_server
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import Role as TokenRole
from fulmen_service_kit.tokens import TokenSigner, new_token_id
from fulmen_store.access_policy import ROLE_POLICY, SERVICE_NAMES
from fulmen_store.clients.peers import GrpcPeers
from fulmen_store.domain.attempt_ends import AttemptEnds
from fulmen_store.domain.dead_letters import DeadLetters
from fulmen_store.domain.dispatcher import Dispatcher
from fulmen_store.domain.durations import Durations
from fulmen_store.domain.feed import FeedFollower
from fulmen_store.domain.hedging import Hedger
from fulmen_store.domain.lease_returner import LeaseReturner
from fulmen_store.domain.leases import EndedAttempt
from fulmen_store.domain.overdue import Overdue
from fulmen_store.domain.peers import NewsListener, NewsTeller
from fulmen_store.domain.projects import ProjectFollower, Projects
from fulmen_store.domain.queue_stats import StatsCache
from fulmen_store.domain.quotas import QueueQuotas
from fulmen_store.domain.replicas import LiveReplicas, MembershipRenewer
from fulmen_store.domain.resource_gc import ResourceCollector
from fulmen_store.domain.resource_uses import ExpiringVersions
from fulmen_store.domain.resource_watch import ResourceWatcher
from fulmen_store.domain.resources import Resources
from fulmen_store.domain.rollouts import Rollouts
from fulmen_store.domain.runner_registry import RunnerBoard, SessionNotes
from fulmen_store.domain.seats import Drained, LeasesLost, Seats
from fulmen_store.domain.sessions import LeaseRenewer, LeaseSweeper, Sessions
from fulmen_store.domain.tokens import Tokens
from fulmen_store.domain.upkeep import Upkeep
from fulmen_store.domain.wakeups import Wakeups
from fulmen_store.metrics import StoreMetrics
from fulmen_store.persistence.database import Database, connect
from fulmen_store.persistence.database_watch import DatabaseWatch
from fulmen_store.persistence.dead_letters import PgDeadLetters
from fulmen_store.persistence.leases import PgFeed, PgLeases, PgSessions, PgUpkeep
from fulmen_store.persistence.migrations import migrate
from fulmen_store.persistence.overdue import PgOverdue
from fulmen_store.persistence.projects import PgProjects, PgTokens
from fulmen_store.persistence.queue_rules import PgDurations, PgQueueStats
from fulmen_store.persistence.replicas import PgReplicas
from fulmen_store.persistence.resource_gc import PgGarbage
from fulmen_store.persistence.resources import PgResources
from fulmen_store.persistence.rollout_lists import PgRolloutLists
from fulmen_store.persistence.rollouts import PgRollouts
from fulmen_store.persistence.runners import PgRunners
from fulmen_store.settings import StoreSettings
from fulmen_store.span_parts import SpanParts, wire_spans
from fulmen_store.transport.health import StoreHealth
from fulmen_store.transport.lease_service import LeaseService
from fulmen_store.transport.peer_service import PeerService
from fulmen_store.transport.project_service import ProjectService, token_signer
from fulmen_store.transport.registry_service import RunnerRegistryService
from fulmen_store.transport.resource_service import ResourceService
from fulmen_store.transport.rollout_codec import explained, repeated_rollout
from fulmen_store.transport.rollout_service import RolloutService

__all__ = ["build"]

DRAIN_LOOK_S: Final = 0.02
RESOURCE_GC_INTERVAL_S: Final = 60.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Everything that reads and writes PostgreSQL."""

    database: Database
    rollouts: PgRollouts
    rollout_lists: PgRolloutLists
    dead_letters: PgDeadLetters
    leases: PgLeases
    queue_stats: PgQueueStats
    durations: PgDurations
    sessions: PgSessions
    runners: PgRunners
    overdue: PgOverdue
    feed: PgFeed
    resources: PgResources
    garbage: PgGarbage
    upkeep: PgUpkeep
    projects: PgProjects
    tokens: PgTokens
    replicas: PgReplicas


@dataclass(frozen=True, slots=True, kw_only=True)
class _Domain:
    """Use cases, background roles and what they share."""

    seats: Seats
    wakeups: Wakeups
    stopping: asyncio.Event
    ends: AttemptEnds
    returner: LeaseReturner
    dispatcher: Dispatcher
    durations: Durations
    notes: SessionNotes
    board: RunnerBoard
    overdue: Overdue
    rollouts: Rollouts
    sessions: Sessions
    spans: SpanParts
    upkeep: Upkeep
    revoked: RevokedTokens
    replicas: LiveReplicas
    news: NewsTeller
    listener: NewsListener


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Makes the parts of the store and wires them.

    Raises:
        DatabaseUnavailable: if PostgreSQL did not answer in time.
        MigrationError: if the schema cannot be brought up to date.
        StartupError: if the port cannot be bound.
    """
    assert isinstance(settings, StoreSettings)
    settings = _with_key(settings)
    tables = await _open_tables(settings, stack)
    peers = GrpcPeers(_peer_tokens(settings))
    stack.push_async_callback(peers.close)
    domain = _wire_domain(tables, settings, peers)
    await domain.upkeep.work_once()
    server = build_server(
        settings,
        policy=ROLE_POLICY,
        service_names=SERVICE_NAMES,
        register=lambda server: _register(server, tables, domain, settings),
        revoked=domain.revoked,
    )
    membership = MembershipRenewer(
        table=tables.replicas,
        replicas=domain.replicas,
        address=settings.peer_address(server.port),
        runner_count=lambda: len(domain.seats),
    )
    health = StoreHealth(server, stopping=domain.stopping.is_set)
    watch = DatabaseWatch(
        database=tables.database,
        dsn=settings.database_url.get_secret_value(),
        connections=settings.database_connections,
        changed=health.set_ready,
    )
    http = domain.spans.serve_http(server, settings, stack)
    roles = _roles(tables, domain, settings.lease_ttl_s) | domain.spans.roles()
    roles |= {"membership-renewer": membership, "database-watch": watch, "http-server": http}

    async def drain() -> None:
        await asyncio.gather(http.drain(), _drain(domain, membership, health))

    return ServiceParts(server=server, roles=roles, drain=drain, ports={"http_port": http.port})


async def _open_tables(settings: StoreSettings, stack: AsyncExitStack) -> _Tables:
    dsn = settings.database_url.get_secret_value()
    database = await connect(
        dsn, connections=settings.database_connections, start_limit_s=settings.database_start_limit_s
    )
    stack.push_async_callback(database.close)
    if settings.auto_migrate:
        _log.info("schema_ready", applied=await migrate(dsn))
    return _Tables(
        database=database,
        rollouts=PgRollouts(database),
        rollout_lists=PgRolloutLists(database),
        dead_letters=PgDeadLetters(database),
        leases=PgLeases(database),
        queue_stats=PgQueueStats(database),
        durations=PgDurations(database),
        sessions=PgSessions(database),
        runners=PgRunners(database),
        overdue=PgOverdue(database),
        feed=PgFeed(database),
        resources=PgResources(database),
        garbage=PgGarbage(database),
        upkeep=PgUpkeep(database),
        projects=PgProjects(database),
        tokens=PgTokens(database),
        replicas=PgReplicas(database),
    )


def _wire_domain(tables: _Tables, settings: StoreSettings, peers: GrpcPeers) -> _Domain:
    metrics, seats, replicas = StoreMetrics(), Seats(), LiveReplicas(uuid7())
    news = NewsTeller(replicas=replicas, client=peers, seats=seats, enabled=settings.notify_peers)
    wakeups = Wakeups(announced=news.announced)

    def finished(projects: frozenset[int]) -> None:
        wakeups.announce(("finished", project) for project in projects)

    durations, notes = Durations(tables.durations), SessionNotes()

    def ended(attempts: Sequence[EndedAttempt]) -> None:
        durations.learn(attempts)
        notes.ended(attempts)
        dispatcher.freed(one.item.project_id for one in attempts)
        for one in attempts:
            if one.superseded is not None:
                session_id, epoch = one.superseded
                seats.lease_over(session_id, one.item.rollout_id)
                news.tell_each([(session_id, LeasesLost(attempts=[(one.item.rollout_id, epoch)]))])

    ends = AttemptEnds(
        table=tables.leases,
        requeued=lambda items: dispatcher.offer(items),
        finished=finished,
        left=seats.lease_over,
        ended=ended,
        observe_batch=metrics.batch,
    )
    returner = LeaseReturner(ends)
    dispatcher = Dispatcher(
        table=tables.leases,
        seats=seats,
        undelivered=returner.give_back,
        poll_interval_s=settings.poll_interval_s,
        meter=metrics,
        predicted_s=durations.predicted_s,
        place=replicas.place,
        unmatched=news.ready,
    )
    metrics.watch_database(lambda: int(tables.database.is_up))
    metrics.watch_queue(known=lambda: len(dispatcher), credit=seats.open_credit, runners=lambda: len(seats))
    return _Domain(
        seats=seats,
        wakeups=wakeups,
        stopping=asyncio.Event(),
        ends=ends,
        returner=returner,
        dispatcher=dispatcher,
        durations=durations,
        notes=notes,
        board=RunnerBoard(table=tables.runners),
        overdue=Overdue(
            table=tables.overdue,
            ends=ends,
            tell=news.tell_each,
            finished=finished,
            explain=explained,
            attempt_grace_s=settings.attempt_grace_s,
            lease_ttl_s=settings.lease_ttl_s,
        ),
        rollouts=Rollouts(
            table=tables.rollouts,
            versions=ExpiringVersions(tables.resources),
            dispatcher=dispatcher,
            finished=finished,
            tell=news.tell_each,
            admit=QueueQuotas(tables.queue_stats.queued).admit,
            new_ids=uuid7s,
            now=_now,
            cancel_grace_s=settings.cancel_grace_s,
            observe_batch=metrics.batch,
        ),
        sessions=Sessions(
            sessions=tables.sessions,
            leases=tables.leases,
            seats=seats,
            ends=ends,
            lease_ttl_s=settings.lease_ttl_s,
            new_id=uuid7,
        ),
        spans=wire_spans(tables.database, settings, rollouts=tables.rollouts, metrics=metrics),
        upkeep=Upkeep(table=tables.upkeep, today=lambda: _now().date()),
        revoked=RevokedTokens(),
        replicas=replicas,
        news=news,
        listener=NewsListener(look=dispatcher.look, wakeups=wakeups, leases=tables.leases, seats=seats),
    )


def _roles(tables: _Tables, domain: _Domain, lease_ttl_s: float) -> dict[str, Role]:
    return {
        "create-committer": domain.rollouts.creations,
        "end-committer": domain.ends.committer,
        "session-lookups": domain.sessions.lookups,
        "dispatcher": domain.dispatcher,
        "durations": domain.durations,
        "hedger": Hedger(table=tables.leases, dispatcher=domain.dispatcher, sketch=domain.durations.sketch),
        "lease-returner": domain.returner,
        "lease-renewer": LeaseRenewer(
            sessions=tables.sessions,
            leases=tables.leases,
            seats=domain.seats,
            notes=domain.notes,
            lease_ttl_s=lease_ttl_s,
        ),
        "runner-board": domain.board,
        "lease-sweeper": LeaseSweeper(
            sessions=tables.sessions,
            leases=tables.leases,
            seats=domain.seats,
            ends=domain.ends,
            lease_ttl_s=lease_ttl_s,
        ),
        "overdue": domain.overdue,
        "resource-collector": ResourceCollector(table=tables.garbage, interval_s=RESOURCE_GC_INTERVAL_S),
        "upkeep": domain.upkeep,
        "project-follower": ProjectFollower(read=tables.leases.projects, tell=domain.dispatcher.know_project),
        "revocations": RevocationFollower(revoked=domain.revoked, fetch=tables.tokens.revoked),
        "news-teller": domain.news,
    }


def _register(server: grpc.aio.Server, tables: _Tables, domain: _Domain, settings: StoreSettings) -> None:
    stopping, poll_s = domain.stopping.is_set, settings.poll_interval_s
    rollout_service = RolloutService(
        rollouts=domain.rollouts,
        table=tables.rollouts,
        lists=tables.rollout_lists,
        dead_letters=DeadLetters(
            rollouts=domain.rollouts, table=tables.rollouts, dead=tables.dead_letters, again=repeated_rollout
        ),
        feed=FeedFollower(table=tables.feed, wakeups=domain.wakeups, poll_interval_s=poll_s),
        seats=domain.seats,
        dispatcher=domain.dispatcher,
        stats=StatsCache(tables.queue_stats.stats),
        stopping=stopping,
    )
    lease_service = LeaseService(
        sessions=domain.sessions,
        seats=domain.seats,
        notes=domain.notes,
        dispatcher=domain.dispatcher,
        ends=domain.ends,
        table=tables.rollouts,
        signer=TokenSigner(settings.signing_key.get_secret_value()),
        undelivered=domain.returner.give_back,
        drain_notice_s=settings.drain_notice_s,
    )
    resource_service = ResourceService(
        resources=Resources(table=tables.resources, wakeups=domain.wakeups),
        watcher=ResourceWatcher(table=tables.resources, wakeups=domain.wakeups, poll_interval_s=poll_s),
        table=tables.resources,
        rollouts=tables.rollouts,
        stopping=stopping,
    )
    rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(rollout_service, server)
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(lease_service, server)
    resource_service_pb2_grpc.add_ResourceServiceServicer_to_server(resource_service, server)
    domain.spans.register(server)
    peer_service_pb2_grpc.add_PeerServiceServicer_to_server(PeerService(domain.listener), server)
    registry = RunnerRegistryService(table=tables.runners, board=domain.board, stopping=stopping)
    runner_registry_service_pb2_grpc.add_RunnerRegistryServiceServicer_to_server(registry, server)
    project_service = ProjectService(
        projects=Projects(table=tables.projects),
        tokens=Tokens(
            table=tables.tokens,
            sign=token_signer(TokenSigner(settings.signing_key.get_secret_value())),
            new_id=new_token_id,
            revoked=domain.revoked.add,
        ),
        table=tables.projects,
        token_table=tables.tokens,
    )
    project_service_pb2_grpc.add_ProjectServiceServicer_to_server(project_service, server)


async def _drain(domain: _Domain, membership: MembershipRenewer, health: StoreHealth) -> None:
    """Leaves the other replicas, tells watchers and runners to move, and waits until the runners have."""
    domain.stopping.set()
    await health.set_ready(False)
    domain.wakeups.announce_all()
    domain.seats.tell_each([(seat.session_id, Drained()) for seat in domain.seats.all_open()])
    await membership.leave()
    while len(domain.seats):  # noqa: ASYNC110  # the lifecycle bounds the wait
        await asyncio.sleep(DRAIN_LOOK_S)


def _with_key(settings: StoreSettings) -> StoreSettings:
    """Gives a store in dev mode without a key one of its own, so that attempts get keys that it accepts."""
    if settings.signing_key.get_secret_value():
        return settings
    return settings.model_copy(update={"signing_key": SecretStr(secrets.token_urlsafe(32))})


def _peer_tokens(settings: StoreSettings) -> Callable[[float], str]:
    signer = TokenSigner(settings.signing_key.get_secret_value())
    return lambda ttl_s: signer.issue(TokenRole.SERVICE, subject="store-replica", ttl_s=ttl_s, project=ALL_PROJECTS)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
