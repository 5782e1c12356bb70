"""The servicers of the store, and the use cases that only they need."""

from __future__ import annotations

import datetime
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio

from fulmen.keda import externalscaler_pb2_grpc
from fulmen.store.v1 import (
    annotation_service_pb2_grpc,
    audit_service_pb2_grpc,
    call_service_pb2_grpc,
    effect_service_pb2_grpc,
    lease_service_pb2_grpc,
    peer_service_pb2_grpc,
    project_service_pb2_grpc,
    proxy_service_pb2_grpc,
    queue_service_pb2_grpc,
    resource_service_pb2_grpc,
    rollout_service_pb2_grpc,
    run_history_service_pb2_grpc,
    run_lease_service_pb2_grpc,
    runner_registry_service_pb2_grpc,
    schedule_service_pb2_grpc,
    secret_service_pb2_grpc,
    span_service_pb2_grpc,
    stored_response_service_pb2_grpc,
    usage_service_pb2_grpc,
)
from fulmen_service_kit.http.server import HttpServer, bind
from fulmen_service_kit.lifecycle import Role
from fulmen_service_kit.rpc.server import RpcServer
from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.sealing import BACKEND_KEYS_LABEL, SECRETS_LABEL, Sealer
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_store.annotations.annotations import Annotations
from fulmen_store.annotations.table import AnnotationTable
from fulmen_store.audit.table import AuditTable
from fulmen_store.audit.writer import AuditWriter
from fulmen_store.calls.responses import StoredResponseTable
from fulmen_store.calls.table import CallTable
from fulmen_store.database.database import Database
from fulmen_store.effects.table import EffectTable
from fulmen_store.leases.progress import ProgressTable, ProgressWriter
from fulmen_store.leases.table import AttemptBoundTable, AttemptCheckTable
from fulmen_store.projects.projects import Projects
from fulmen_store.projects.removal import DeletedProjects, ProjectRemover
from fulmen_store.projects.table import ProjectTable, TokenTable
from fulmen_store.projects.tokens import Tokens
from fulmen_store.proxies.table import ProxyTable
from fulmen_store.resources.resources import Resources
from fulmen_store.resources.watch import ResourceWatcher
from fulmen_store.retention.retention import (
    AgeRetention,
    RecordRetention,
    Retention,
    UsageRetention,
)
from fulmen_store.retention.table import RetentionTable, UpkeepTable
from fulmen_store.rollouts.changes import ChangeTable, QueueChanges
from fulmen_store.rollouts.dead_letters import DeadLetters
from fulmen_store.rollouts.deletion import Deletion, DeletionTable
from fulmen_store.rollouts.facet_lists import RolloutFacets
from fulmen_store.rollouts.feed import FeedFollower
from fulmen_store.rollouts.lists import DeadLetterTable, RolloutLists
from fulmen_store.rollouts.watch import ChangedTable, ChangeFollower
from fulmen_store.run_history.table import RunHistoryTable
from fulmen_store.run_leases.table import RunLeaseTable
from fulmen_store.schedules.due_schedules import DueSchedules
from fulmen_store.schedules.schedules import Schedules
from fulmen_store.schedules.table import ScheduleTable
from fulmen_store.scheduling.queue_watch import QueueWatch
from fulmen_store.scheduling.table import QueueStatsTable
from fulmen_store.sealed_secrets.sealed_secrets import SecretResealer, Secrets
from fulmen_store.sealed_secrets.table import SecretTable
from fulmen_store.segments.mover import SegmentMover
from fulmen_store.segments.table import SegmentTable
from fulmen_store.settings import StoreSettings
from fulmen_store.spans.blobs import Blobs, open_storage
from fulmen_store.spans.following import SpanFollower
from fulmen_store.spans.spans import Spans
from fulmen_store.spans.table import SpanTable
from fulmen_store.transport.annotation_service import AnnotationService
from fulmen_store.transport.assignments import Assignments
from fulmen_store.transport.audit_service import AuditService
from fulmen_store.transport.call_service import CallService
from fulmen_store.transport.comparison import RolloutComparison
from fulmen_store.transport.effect_service import EffectService
from fulmen_store.transport.lease_service import LeaseService
from fulmen_store.transport.otlp.http import OtlpHttpApp
from fulmen_store.transport.otlp.ingest import OtlpIngest
from fulmen_store.transport.peer_service import PeerService
from fulmen_store.transport.project_service import ProjectService
from fulmen_store.transport.proxy_service import ProxyService
from fulmen_store.transport.queue_service import QueueService
from fulmen_store.transport.registry_service import RunnerRegistryService
from fulmen_store.transport.resource_service import ResourceService
from fulmen_store.transport.rollout_lists import ListRequests
from fulmen_store.transport.rollout_service import RolloutService
from fulmen_store.transport.run_history_service import RunHistoryService
from fulmen_store.transport.run_lease_service import RunLeaseService
from fulmen_store.transport.scaler_service import ScalerService
from fulmen_store.transport.schedule_service import ScheduleService
from fulmen_store.transport.secret_service import SecretService
from fulmen_store.transport.span_service import SpanService, add_trace_service
from fulmen_store.transport.stored_response_service import StoredResponseService
from fulmen_store.transport.usage_service import UsageService
from fulmen_store.usage.compute import ComputeCosts, ComputePrices
from fulmen_store.usage.sync import UsageSync
from fulmen_store.usage.table import UsageTable
from fulmen_store.usage.used_up import BudgetWatch
from fulmen_store.wiring.queue_parts import Queue

__all__ = ["Servicers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Basis:
    """What servicers are made of.

    Attributes:
        blobs: The blob storage; None without one.
        usage: The table that both projects and usage read.
        roles: Background roles; each servicer adds those that work for it.
    """

    queue: Queue
    database: Database
    settings: StoreSettings
    keys: StoreKeys
    verifier: TokenVerifier
    blobs: Blobs | None
    usage: UsageTable
    roles: dict[str, Role]


class Servicers:
    """The servicers and their background roles."""

    server: RpcServer

    def __init__(
        self,
        queue: Queue,
        database: Database,
        settings: StoreSettings,
        *,
        keys: StoreKeys,
        verifier: TokenVerifier,
    ) -> None:
        """Creates the servicers; `server` is set once it has been built."""
        self._settings, self._database = settings, database
        self.roles: dict[str, Role] = {"age-retention": AgeRetention(table=UpkeepTable(database))}
        basis = _Basis(
            queue=queue, database=database, settings=settings, keys=keys, verifier=verifier,
            blobs=Blobs(open_storage(settings.blob_url)) if settings.blob_url else None,
            usage=UsageTable(database), roles=self.roles,
        )  # fmt: skip
        names = queue.project_names
        self.rollouts = _rollouts(basis)
        self.leases = _leases(basis)
        self.queues = _queues(basis)
        self.resources = _resources(basis)
        self.schedules = _schedules(basis)
        self.spans, self.ingest = _spans(basis)

        self.projects = _projects(basis)
        self.secrets = _secrets(basis)
        self.usage = _usage(basis)
        self.audit, self.audit_writer = _audit(basis)

        self.registry = RunnerRegistryService(
            table=queue.runners, fleet=queue.fleet, demand=queue.demand, orders=queue.orders, stopping=queue.stopping
        )
        self.scaler = ScalerService(
            demand=queue.demand, identify=lambda *call: self.server.identify(*call), stopping=queue.stopping
        )
        self.peers = PeerService(queue.receiver)
        self.run_history = RunHistoryService(table=RunHistoryTable(database), projects=names)
        self.run_leases = RunLeaseService(table=RunLeaseTable(database), projects=names)

        self.proxies = ProxyService(table=ProxyTable(database), projects=names)
        self.calls = _calls(basis)
        self.stored_responses = _stored_responses(basis)
        self.annotations = _annotations(basis)
        self.effects = EffectService(table=EffectTable(database), projects=names)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers to a server."""
        rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollouts, server)
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(self.leases, server)
        queue_service_pb2_grpc.add_QueueServiceServicer_to_server(self.queues, server)
        resource_service_pb2_grpc.add_ResourceServiceServicer_to_server(self.resources, server)
        project_service_pb2_grpc.add_ProjectServiceServicer_to_server(self.projects, server)
        usage_service_pb2_grpc.add_UsageServiceServicer_to_server(self.usage, server)
        proxy_service_pb2_grpc.add_ProxyServiceServicer_to_server(self.proxies, server)
        schedule_service_pb2_grpc.add_ScheduleServiceServicer_to_server(self.schedules, server)
        secret_service_pb2_grpc.add_SecretServiceServicer_to_server(self.secrets, server)
        runner_registry_service_pb2_grpc.add_RunnerRegistryServiceServicer_to_server(self.registry, server)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(self.scaler, server)
        run_lease_service_pb2_grpc.add_RunLeaseServiceServicer_to_server(self.run_leases, server)
        run_history_service_pb2_grpc.add_RunHistoryServiceServicer_to_server(self.run_history, server)
        peer_service_pb2_grpc.add_PeerServiceServicer_to_server(self.peers, server)
        span_service_pb2_grpc.add_SpanServiceServicer_to_server(self.spans, server)
        call_service_pb2_grpc.add_CallServiceServicer_to_server(self.calls, server)
        annotation_service_pb2_grpc.add_AnnotationServiceServicer_to_server(self.annotations, server)
        audit_service_pb2_grpc.add_AuditServiceServicer_to_server(self.audit, server)
        stored_response_service_pb2_grpc.add_StoredResponseServiceServicer_to_server(self.stored_responses, server)
        effect_service_pb2_grpc.add_EffectServiceServicer_to_server(self.effects, server)
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


def _rollouts(basis: _Basis) -> RolloutService:
    queue, database = basis.queue, basis.database
    table, lists = queue.rollout_table, RolloutLists(database, queue.project_names)
    deletion = Deletion(table=DeletionTable(database), lists=lists, blobs=basis.blobs)
    basis.roles["retention"] = Retention(table=RetentionTable(database), blobs=basis.blobs)
    basis.roles["project-remover"] = ProjectRemover(
        projects=DeletedProjects(database), rollouts=queue.rollouts, deletion=deletion
    )
    return RolloutService(
        rollouts=queue.rollouts, table=table, lists=ListRequests(lists=lists, facets=RolloutFacets(database)),
        changes=QueueChanges(table=ChangeTable(database), wakeups=queue.wakeups),
        deletion=deletion, comparison=RolloutComparison(lists=lists, table=table),
        dead_letters=DeadLetters(rollouts=queue.rollouts, table=table, dead=DeadLetterTable(database)),
        feed=FeedFollower(table=queue.feed_table, watch=queue.feed_watch),
        watch=ChangeFollower(table=ChangedTable(database), stopping=queue.stopping),
        dispatcher=queue.dispatcher, stats=queue.stats, stopping=queue.stopping,
    )  # fmt: skip


def _leases(basis: _Basis) -> LeaseService:
    queue, database = basis.queue, basis.database
    basis.roles["progress-writer"] = progress = ProgressWriter(ProgressTable(database))
    return LeaseService(
        sessions=queue.sessions, dispatcher=queue.dispatcher, ends=queue.ends, projects=queue.project_names,
        checks=AttemptCheckTable(database), progress=progress, drain_notice_s=basis.settings.drain_notice_s,
        stopping=queue.stopping, orders=queue.orders,
        assignments=Assignments(
            signer=queue.signer, durations=queue.durations, bounds=AttemptBoundTable(database)
        ),
    )  # fmt: skip


def _queues(basis: _Basis) -> QueueService:
    queue = basis.queue
    watch = QueueWatch(
        stats=queue.stats,
        open_credit=queue.dispatcher.open_credit,
        unmatched=queue.dispatcher.unmatched_labels,
        find_run=queue.rollout_table.find_run,
        stopping=queue.stopping,
    )
    return QueueService(table=QueueStatsTable(basis.database), watch=watch, rollouts=queue.rollout_table)


def _resources(basis: _Basis) -> ResourceService:
    queue, table = basis.queue, basis.queue.resource_table
    return ResourceService(
        resources=Resources(table=table, wakeups=queue.wakeups),
        watcher=ResourceWatcher(
            table=table, wakeups=queue.wakeups, poll_interval_s=basis.settings.poll_interval_s
        ),
        table=table, rollouts=queue.rollout_table, metrics=queue.metrics, stopping=queue.stopping,
    )  # fmt: skip


def _schedules(basis: _Basis) -> ScheduleService:
    queue, table = basis.queue, ScheduleTable(basis.database)
    basis.roles["due-schedules"] = DueSchedules(table=table, rollouts=queue.rollouts, metrics=queue.metrics)
    return ScheduleService(schedules=Schedules(table), table=table, projects=queue.project_names)


def _spans(basis: _Basis) -> tuple[SpanService, OtlpIngest]:
    """Returns the servicers that read and receive spans."""
    queue, settings, blobs = basis.queue, basis.settings, basis.blobs
    table = SpanTable(
        basis.database,
        queue.project_names,
        blobs=blobs,
        key_grace_s=settings.attempt_key_grace_s,
        metrics=queue.metrics,
    )
    spans = Spans(
        # With segments nothing is written to the blob storage first, and appends do not need it.
        table=table, blobs=None if settings.segment_bytes else blobs, blob_min_bytes=settings.blob_min_bytes,
        metrics=queue.metrics, traces=queue.traces, wakeups=queue.wakeups,
    )  # fmt: skip
    follower = SpanFollower(table=table, wakeups=queue.wakeups, poll_interval_s=settings.poll_interval_s)
    basis.roles.update({"span-committer": spans.committer, "span-packer": spans.packer, "span-looks": follower.looks})
    if blobs is not None:
        basis.roles["segments"] = SegmentMover(
            table=SegmentTable(basis.database), blobs=blobs, read_chunks=table.read_rows,
            segment_bytes=settings.segment_bytes, after_s=settings.segment_after_s, metrics=queue.metrics,
        )  # fmt: skip
    service = SpanService(
        spans=spans, table=table, follower=follower, rollouts=queue.rollout_table, metrics=queue.metrics,
        stopping=queue.stopping,
    )  # fmt: skip
    return service, OtlpIngest(spans=spans, metrics=queue.metrics)


def _projects(basis: _Basis) -> ProjectService:
    queue, table, tokens = basis.queue, ProjectTable(basis.database), TokenTable(basis.database)
    return ProjectService(
        projects=Projects(table=table, wakeups=queue.wakeups),
        tokens=Tokens(table=tokens, signer=queue.signer, revoked=queue.revoked),
        table=table, token_table=tokens, verifier=basis.verifier, keys=basis.keys, usage=basis.usage,
    )  # fmt: skip


def _secrets(basis: _Basis) -> SecretService:
    queue, keys = basis.queue, basis.keys
    table, sealer = SecretTable(basis.database), Sealer(keys.lines, SECRETS_LABEL)
    basis.roles["secret-resealer"] = SecretResealer(table=table, sealer=sealer)
    return SecretService(
        secrets=Secrets(table=table, sealer=sealer),
        table=table,
        resources=queue.resource_table,
        projects=queue.project_names,
        proxy_sealer=Sealer(lambda: keys.current().attempts, BACKEND_KEYS_LABEL),
    )


def _usage(basis: _Basis) -> UsageService:
    queue, table = basis.queue, basis.usage
    costs = ComputeCosts(
        prices=ComputePrices(basis.settings.compute_prices),
        table=table,
        instance_id=f"store-{queue.replicas.own_id}",
    )
    queue.events.attempts_ended.subscribe(costs.ended)
    basis.roles["compute-costs"] = costs
    basis.roles["budget-watch"] = BudgetWatch(table=table, used_up=queue.used_up, wakeups=queue.wakeups)
    basis.roles["usage-retention"] = UsageRetention(table=table)
    return UsageService(
        sync=UsageSync(table=table, rollouts=queue.rollout_table), table=table, rollouts=queue.rollout_table
    )


def _audit(basis: _Basis) -> tuple[AuditService, AuditWriter]:
    """Returns the servicer that lists audited calls, and what writes them."""
    entries = AuditTable(basis.database)
    basis.roles["audit-writer"] = writer = AuditWriter(entries)
    return AuditService(table=entries, projects=basis.queue.project_names), writer


def _calls(basis: _Basis) -> CallService:
    queue = basis.queue
    table = CallTable(basis.database, max_bytes=basis.settings.recorded_bytes_per_project, metrics=queue.metrics)
    basis.roles["call-retention"] = RecordRetention(table=table)
    return CallService(table=table, projects=queue.project_names)


def _stored_responses(basis: _Basis) -> StoredResponseService:
    queue, settings = basis.queue, basis.settings
    table = StoredResponseTable(
        basis.database,
        max_bytes=settings.stored_response_bytes_per_project,
        retention=datetime.timedelta(seconds=settings.stored_response_retention_s),
        metrics=queue.metrics,
    )
    basis.roles["response-committer"] = table.committer
    basis.roles["response-retention"] = RecordRetention(table=table)
    return StoredResponseService(table=table, projects=queue.project_names)


def _annotations(basis: _Basis) -> AnnotationService:
    table = AnnotationTable(basis.database)
    return AnnotationService(annotations=Annotations(table), table=table, projects=basis.queue.project_names)
