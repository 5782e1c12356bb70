"""The composition root of the store: creates every part, wires it, and names the background roles."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Final

import grpc.aio
import structlog
from pydantic import SecretStr

from fulmen.ids import ALL_PROJECTS, uuid7
from fulmen.keda import externalscaler_pb2_grpc
from fulmen.store.v1 import (
    call_service_pb2_grpc,
    lease_service_pb2_grpc,
    peer_service_pb2_grpc,
    project_service_pb2_grpc,
    resource_service_pb2_grpc,
    rollout_service_pb2_grpc,
    run_lease_service_pb2_grpc,
    runner_registry_service_pb2_grpc,
    secret_service_pb2_grpc,
    span_service_pb2_grpc,
    usage_service_pb2_grpc,
)
from fulmen_service_kit.http.server import HttpServer, bind
from fulmen_service_kit.lifecycle import Role, ServiceParts
from fulmen_service_kit.observability.own_traces import own_traces
from fulmen_service_kit.rpc.server import RpcServer, build_server
from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.own_token import OwnToken
from fulmen_service_kit.security.permissions import SCALER
from fulmen_service_kit.security.revocation import RevocationFollower, RevokedTokens
from fulmen_service_kit.security.sealing import BACKEND_KEYS_LABEL, SECRETS_LABEL, Sealer
from fulmen_service_kit.security.tokens import TokenSigner, TokenVerifier
from fulmen_service_kit.settings import ServiceSettings
from fulmen_store.calls.table import CallTable
from fulmen_store.database.database import Database, connect
from fulmen_store.database.migrations import migrate
from fulmen_store.database.watch import DatabaseWatch
from fulmen_store.events import QueueEvents
from fulmen_store.leases.attempt_ends import AttemptEnds, LeaseReturner
from fulmen_store.leases.clock_mender import ClockMender
from fulmen_store.leases.overdue import OverdueReaper
from fulmen_store.leases.sessions import LeaseRenewer, LeaseSweeper, Sessions
from fulmen_store.leases.table import AttemptCheckTable, OverdueTable, PgLeaseTable, SessionTable
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.names import ProjectNames
from fulmen_store.projects.projects import ProjectFollower, Projects
from fulmen_store.projects.removal import DeletedProjects, ProjectRemover
from fulmen_store.projects.table import ProjectTable, TokenTable
from fulmen_store.projects.tokens import Tokens
from fulmen_store.replicas.live_replicas import LiveReplicas
from fulmen_store.replicas.membership import MembershipRenewer
from fulmen_store.replicas.notifier import NotificationReceiver, NotificationSender
from fulmen_store.replicas.peer_client import PeerClient
from fulmen_store.replicas.table import ReplicaTable
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.resources.garbage_collection import ResourceGarbageCollector
from fulmen_store.resources.lifetimes import ExpiringVersions
from fulmen_store.resources.resources import Resources
from fulmen_store.resources.table import GarbageTable, ResourceTable
from fulmen_store.resources.watch import ResourceWatcher
from fulmen_store.retention.retention import AgeRetention, CallRetention, Maintenance, Retention, UsageRetention
from fulmen_store.retention.table import RetentionTable, UpkeepTable
from fulmen_store.rollouts.changes import ChangeTable, QueueChanges
from fulmen_store.rollouts.dead_letters import DeadLetters
from fulmen_store.rollouts.deletion import Deletion, DeletionTable
from fulmen_store.rollouts.feed import FeedFollower
from fulmen_store.rollouts.feed_watch import FeedWatch
from fulmen_store.rollouts.lists import DeadLetterTable, RolloutLists
from fulmen_store.rollouts.rollouts import Rollouts
from fulmen_store.rollouts.table import FeedTable, RolloutTable
from fulmen_store.run_leases.table import RunLeaseTable
from fulmen_store.run_leases.unowned import UnownedRuns
from fulmen_store.runners.fleet import FleetWatcher
from fulmen_store.runners.fleet_demand import FleetDemand
from fulmen_store.runners.session_updates import SessionUpdates
from fulmen_store.runners.table import RunnerTable
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.durations import DurationTracker
from fulmen_store.scheduling.hedging import Hedger
from fulmen_store.scheduling.queue_stats import StatsCache
from fulmen_store.scheduling.quotas import QueueQuotas
from fulmen_store.scheduling.runner_streams import Drained, RunnerStreams
from fulmen_store.scheduling.table import DemandTable, DurationTable, QueueStatsTable
from fulmen_store.sealed_secrets.sealed_secrets import SecretResealer, Secrets
from fulmen_store.sealed_secrets.table import SecretTable
from fulmen_store.settings import StoreSettings
from fulmen_store.spans.blobs import Blobs, open_storage
from fulmen_store.spans.following import SpanFollower
from fulmen_store.spans.spans import Spans
from fulmen_store.spans.table import SpanTable
from fulmen_store.traces import RolloutTraces
from fulmen_store.transport.call_service import CallService
from fulmen_store.transport.lease_service import LeaseService
from fulmen_store.transport.otlp.http import OtlpHttpApp
from fulmen_store.transport.otlp.ingest import OtlpIngest
from fulmen_store.transport.peer_service import PeerService
from fulmen_store.transport.project_service import ProjectService
from fulmen_store.transport.registry_service import RunnerRegistryService
from fulmen_store.transport.resource_service import ResourceService
from fulmen_store.transport.rollout_service import RolloutService
from fulmen_store.transport.run_lease_service import RunLeaseService
from fulmen_store.transport.scaler_service import ScalerService
from fulmen_store.transport.secret_service import SecretService
from fulmen_store.transport.span_service import SpanService, add_trace_service
from fulmen_store.transport.usage_service import UsageService
from fulmen_store.usage.sync import UsageSync
from fulmen_store.usage.table import UsageTable

__all__ = ["build"]

SERVICE_NAMES: Final = (
    "fulmen.store.v1.RolloutService",
    "fulmen.store.v1.LeaseService",
    "fulmen.store.v1.SpanService",
    "fulmen.store.v1.ResourceService",
    "fulmen.store.v1.RunnerRegistryService",
    "fulmen.store.v1.ProjectService",
    "fulmen.store.v1.PeerService",
    "fulmen.store.v1.UsageService",
    "fulmen.store.v1.SecretService",
    "fulmen.store.v1.RunLeaseService",
    "fulmen.store.v1.CallService",
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
    queue = _Queue(database, settings, keys, stack)
    verifier = TokenVerifier(keys, revoked=queue.revoked, clock=database.clock, runs=AttemptCheckTable(database).runs)
    services = _Services(queue, database, settings, keys=keys, verifier=verifier)
    server = build_server(settings, verifier=verifier, service_names=SERVICE_NAMES, register=services.register)
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


class _Queue:
    """Use cases and background roles of the queue, and what they share."""

    def __init__(self, database: Database, settings: StoreSettings, keys: StoreKeys, stack: AsyncExitStack) -> None:
        traces = own_traces()
        self.stopping = asyncio.Event()
        self.events = events = QueueEvents()
        self.metrics = metrics = StoreMetrics()
        self.project_names = project_names = ProjectNames(database)
        self.traces = None if traces is None else RolloutTraces(traces, project_names)
        self.streams = streams = RunnerStreams()
        self.replicas = replicas = LiveReplicas(uuid7())
        self.wakeups = wakeups = Wakeups()
        self.revoked, self.signer = RevokedTokens(), TokenSigner(keys, clock=database.clock)
        self.leases = leases = PgLeaseTable(database, project_names, lost_to_pause=settings.lost_to_pause)
        self.rollout_table = rollouts = RolloutTable(database, project_names)
        self.resource_table = ResourceTable(database)
        sessions, stats, durations = SessionTable(database, metrics), QueueStatsTable(database), DurationTable(database)
        lease_ttl_s = settings.lease_ttl_s

        # Scheduling: which rollout goes to which runner.
        self.durations = DurationTracker(durations)
        self.stats = StatsCache(stats)
        self.dispatcher = Dispatcher(
            table=leases, streams=streams, events=events, poll_interval_s=settings.poll_interval_s,
            replicas=replicas, durations=self.durations, metrics=metrics,
        )  # fmt: skip
        # Leases: how attempts end, and the sessions that hold leases.
        self.ends = AttemptEnds(table=leases, events=events, metrics=metrics)
        self.returner = LeaseReturner(self.ends)
        self.updates = updates = SessionUpdates()
        self.sessions = Sessions(
            sessions=sessions, leases=leases, streams=streams, updates=updates, ends=self.ends, events=events,
            lease_ttl_s=lease_ttl_s,
        )  # fmt: skip
        # Rollouts: creation and cancellation.
        self.rollouts = Rollouts(
            table=rollouts, versions=ExpiringVersions(self.resource_table), quotas=QueueQuotas(stats),
            dispatcher=self.dispatcher, events=events, cancel_grace_s=settings.cancel_grace_s, metrics=metrics,
        )  # fmt: skip
        self.feed_table = FeedTable(database)
        self.feed_watch = FeedWatch(table=self.feed_table, poll_interval_s=settings.poll_interval_s)
        # Runners and replicas.
        self.runners = RunnerTable(database, project_names)
        self.fleet = FleetWatcher(table=self.runners)
        self.demand = FleetDemand(table=DemandTable(database), durations=durations)
        own_token = OwnToken(self.signer, subject="store-replica", project=ALL_PROJECTS)
        peers = PeerClient(own_token, tls=settings.sibling_tls())
        stack.push_async_callback(peers.close)
        self.sender = NotificationSender(
            replicas=replicas, client=peers, streams=streams, projects=project_names, enabled=settings.notify_peers
        )
        self.receiver = NotificationReceiver(
            dispatcher=self.dispatcher, feed=self.feed_watch, wakeups=wakeups, leases=leases, streams=streams
        )
        self._subscribe(database)
        self.roles: dict[str, Role] = {
            "create-committer": self.rollouts.creations,
            "end-committer": self.ends.committer,
            "session-lookups": self.sessions.lookups,
            "dispatcher": self.dispatcher,
            "feed-watch": self.feed_watch,
            "durations": self.durations,
            "hedger": Hedger(table=leases, dispatcher=self.dispatcher, durations=self.durations),
            "lease-returner": self.returner,
            "lease-renewer": LeaseRenewer(
                sessions=sessions, leases=leases, streams=streams, updates=updates, lease_ttl_s=lease_ttl_s
            ),
            "lease-sweeper": LeaseSweeper(
                sessions=sessions, leases=leases, streams=streams, ends=self.ends, lease_ttl_s=lease_ttl_s
            ),
            "clock-mender": ClockMender(database, self.dispatcher, lease_ttl_s, settings.cancel_grace_s),
            "overdue": OverdueReaper(
                table=OverdueTable(database, project_names),
                ends=self.ends,
                events=events,
                attempt_grace_s=settings.attempt_grace_s,
                lease_ttl_s=lease_ttl_s,
            ),
            "fleet-watcher": self.fleet,
            "fleet-demand": self.demand,
            "resource-collector": ResourceGarbageCollector(table=GarbageTable(database)),
            "maintenance": Maintenance(table=UpkeepTable(database)),
            "project-follower": ProjectFollower(leases, self.dispatcher, wakeups, metrics),
            "revocations": RevocationFollower(revoked=self.revoked, fetch=TokenTable(database).revoked),
            "notification-sender": self.sender,
            "unowned-runs": UnownedRuns(RunLeaseTable(database), self.rollouts, settings.unowned_run_limit_s, metrics),
        }

    def _subscribe(self, database: Database) -> None:
        events, metrics = self.events, self.metrics
        events.attempts_ended.subscribe(self.streams.remove_leases)
        events.attempts_ended.subscribe(self.durations.learn)
        events.attempts_ended.subscribe(self.updates.ended)
        events.attempts_ended.subscribe(self.dispatcher.attempts_ended)
        if self.traces is not None:
            events.attempts_ended.subscribe(self.traces.ended)
        events.leases_undelivered.subscribe(self.returner.release)
        events.projects_finished.subscribe(self.feed_watch.hint)
        events.projects_finished.subscribe(self.sender.rollouts_finished)
        events.work_ready.subscribe(self.dispatcher.offer)
        events.work_unmatched.subscribe(self.sender.work_unmatched)
        events.session_notices.subscribe(self.sender.send_each)
        self.wakeups.announced.subscribe(self.sender.announced)
        metrics.watch_database(lambda: int(database.is_writable))
        metrics.watch_demand(self.demand.shown)
        metrics.watch_feed(lambda: self.feed_watch.lag_s)
        metrics.watch_queue(
            known=lambda: len(self.dispatcher),
            credit=self.streams.open_credit,
            runners=lambda: len(self.streams),
        )


class _Services:
    """The servicers, and the use cases that only they need."""

    server: RpcServer

    def __init__(
        self,
        queue: _Queue,
        database: Database,
        settings: StoreSettings,
        *,
        keys: StoreKeys,
        verifier: TokenVerifier,
    ) -> None:
        self._settings, self._database = settings, database
        stopping, poll_s = queue.stopping, settings.poll_interval_s
        wakeups, rollouts, lists = queue.wakeups, queue.rollout_table, RolloutLists(database, queue.project_names)
        usage, projects, tokens = UsageTable(database), ProjectTable(database), TokenTable(database)
        blobs = Blobs(open_storage(settings.blob_url)) if settings.blob_url else None
        deletion = Deletion(table=DeletionTable(database), lists=lists, blobs=blobs)
        self.rollouts = RolloutService(
            rollouts=queue.rollouts, table=rollouts, lists=lists,
            changes=QueueChanges(table=ChangeTable(database), wakeups=wakeups),
            deletion=deletion,
            dead_letters=DeadLetters(rollouts=queue.rollouts, table=rollouts, dead=DeadLetterTable(database)),
            feed=FeedFollower(table=queue.feed_table, watch=queue.feed_watch),
            dispatcher=queue.dispatcher, stats=queue.stats, stopping=stopping,
        )  # fmt: skip
        self.leases = LeaseService(
            sessions=queue.sessions, dispatcher=queue.dispatcher, ends=queue.ends, projects=queue.project_names,
            checks=AttemptCheckTable(database), signer=queue.signer, drain_notice_s=settings.drain_notice_s,
            stopping=stopping,
        )  # fmt: skip
        self.resources = ResourceService(
            resources=Resources(table=queue.resource_table, wakeups=wakeups),
            watcher=ResourceWatcher(table=queue.resource_table, wakeups=wakeups, poll_interval_s=poll_s),
            table=queue.resource_table,
            rollouts=rollouts,
            metrics=queue.metrics,
            stopping=stopping,
        )
        self.projects = ProjectService(
            projects=Projects(table=projects, wakeups=wakeups),
            tokens=Tokens(table=tokens, signer=queue.signer, revoked=queue.revoked),
            table=projects, token_table=tokens, verifier=verifier, keys=keys, usage=usage,
        )  # fmt: skip
        self.secrets, resealer = _secrets(queue, database, keys)
        self.usage = UsageService(sync=UsageSync(table=usage, rollouts=rollouts), table=usage, rollouts=rollouts)
        self.registry = RunnerRegistryService(
            table=queue.runners, fleet=queue.fleet, demand=queue.demand, stopping=stopping
        )
        self.scaler = ScalerService(
            demand=queue.demand, identify=lambda *call: self.server.identify(*call), stopping=stopping
        )
        self.peers = PeerService(queue.receiver)
        self.run_leases = RunLeaseService(table=RunLeaseTable(database), projects=queue.project_names)
        recorded = CallTable(database, max_bytes=settings.recorded_bytes_per_project, metrics=queue.metrics)
        self.calls = CallService(table=recorded, projects=queue.project_names)
        chunks = SpanTable(database, queue.project_names, blobs=blobs, key_grace_s=settings.attempt_key_grace_s)
        spans = Spans(
            table=chunks, blobs=blobs, blob_min_bytes=settings.blob_min_bytes, metrics=queue.metrics,
            traces=queue.traces, wakeups=wakeups,
        )  # fmt: skip
        follower = SpanFollower(table=chunks, wakeups=wakeups, poll_interval_s=poll_s)
        self.spans = SpanService(
            spans=spans, table=chunks, follower=follower, rollouts=rollouts, metrics=queue.metrics, stopping=stopping
        )
        self.ingest = OtlpIngest(spans=spans, metrics=queue.metrics)
        self.roles: dict[str, Role] = {
            "span-committer": spans.committer,
            "span-packer": spans.packer,
            "retention": Retention(table=RetentionTable(database), blobs=blobs),
            "age-retention": AgeRetention(table=UpkeepTable(database)),
            "usage-retention": UsageRetention(table=usage),
            "call-retention": CallRetention(table=recorded),
            "secret-resealer": resealer,
            "project-remover": ProjectRemover(
                projects=DeletedProjects(database), rollouts=queue.rollouts, deletion=deletion
            ),
        }

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers to a server."""
        rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollouts, server)
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(self.leases, server)
        resource_service_pb2_grpc.add_ResourceServiceServicer_to_server(self.resources, server)
        project_service_pb2_grpc.add_ProjectServiceServicer_to_server(self.projects, server)
        usage_service_pb2_grpc.add_UsageServiceServicer_to_server(self.usage, server)
        secret_service_pb2_grpc.add_SecretServiceServicer_to_server(self.secrets, server)
        runner_registry_service_pb2_grpc.add_RunnerRegistryServiceServicer_to_server(self.registry, server)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(self.scaler, server)
        run_lease_service_pb2_grpc.add_RunLeaseServiceServicer_to_server(self.run_leases, server)
        peer_service_pb2_grpc.add_PeerServiceServicer_to_server(self.peers, server)
        span_service_pb2_grpc.add_SpanServiceServicer_to_server(self.spans, server)
        call_service_pb2_grpc.add_CallServiceServicer_to_server(self.calls, server)
        add_trace_service(self.ingest, server)

    def serve_http(self, server: RpcServer, stack: AsyncExitStack) -> HttpServer:
        """Binds the port of OTLP/HTTP, which authenticates callers as the gRPC server does."""
        settings = self._settings
        app = OtlpHttpApp(
            ingest=self.ingest,
            authenticator=server.authenticator,
            limits=server.limits,
            max_body_bytes=settings.max_message_bytes,
            database=self._database,
        )
        listener = bind(settings.host, settings.http_port)
        http = HttpServer(app=app, listener=listener, grace_s=settings.drain_grace_s, tls=settings.own_tls())
        stack.callback(http.close)
        return http


def _secrets(queue: _Queue, database: Database, keys: StoreKeys) -> tuple[SecretService, SecretResealer]:
    """Returns the servicer of secrets, and the role that seals them anew."""
    table, sealer = SecretTable(database), Sealer(keys.lines, SECRETS_LABEL)
    service = SecretService(
        secrets=Secrets(table=table, sealer=sealer),
        table=table,
        resources=queue.resource_table,
        projects=queue.project_names,
        proxy_sealer=Sealer(lambda: keys.current().attempts, BACKEND_KEYS_LABEL),
    )
    return service, SecretResealer(table=table, sealer=sealer)


async def _drain(queue: _Queue, membership: MembershipRenewer) -> None:
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
