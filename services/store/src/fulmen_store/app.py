"""The composition root of the store: the one file that knows all its parts."""

from __future__ import annotations

import asyncio
import datetime
import secrets
from contextlib import AsyncExitStack

import grpc.aio
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from pydantic import SecretStr

from fulmen.ids import uuid7
from fulmen.store.v1 import (
    lease_service_pb2_grpc,
    project_service_pb2_grpc,
    resource_service_pb2_grpc,
    rollout_service_pb2_grpc,
    runner_registry_service_pb2_grpc,
    span_service_pb2_grpc,
)
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.server import build_server
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import TokenSigner
from fulmen_store.access_policy import ROLE_POLICY, SERVICE_NAMES
from fulmen_store.domain.attempt_ends import AttemptEnds
from fulmen_store.domain.dispatcher import Dispatcher
from fulmen_store.domain.feed import FeedFollower
from fulmen_store.domain.lease_returner import LeaseReturner
from fulmen_store.domain.resources import Resources, ResourceWatcher
from fulmen_store.domain.rollouts import Rollouts
from fulmen_store.domain.seats import Drained, Seats
from fulmen_store.domain.sessions import LeaseRenewer, LeaseSweeper, Sessions
from fulmen_store.domain.spans import Spans
from fulmen_store.domain.upkeep import Upkeep
from fulmen_store.domain.wakeups import Wakeups
from fulmen_store.metrics import StoreMetrics
from fulmen_store.persistence.database import connect
from fulmen_store.persistence.leases import PgFeed, PgLeases, PgSessions, PgUpkeep
from fulmen_store.persistence.migrations import migrate
from fulmen_store.persistence.resources import PgResources
from fulmen_store.persistence.rollouts import PgRollouts
from fulmen_store.persistence.spans import PgSpans
from fulmen_store.settings import StoreSettings
from fulmen_store.transport.lease_service import LeaseService
from fulmen_store.transport.registry_service import RunnerRegistryService
from fulmen_store.transport.resource_service import ResourceService
from fulmen_store.transport.rollout_service import RolloutService
from fulmen_store.transport.span_service import SpanService, TraceService

__all__ = ["build"]

DRAIN_LOOK_S = 0.02

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
    dsn = settings.database_url.get_secret_value()
    database = await connect(
        dsn, connections=settings.database_connections, start_limit_s=settings.database_start_limit_s
    )
    stack.push_async_callback(database.close)
    if settings.auto_migrate:
        _log.info("schema_ready", applied=await migrate(dsn))

    # Tables
    rollout_table, lease_table, session_table = PgRollouts(database), PgLeases(database), PgSessions(database)
    span_table, resource_table = PgSpans(database), PgResources(database)

    # Use cases and roles
    metrics, wakeups, seats, stopping = StoreMetrics(), Wakeups(), Seats(), asyncio.Event()
    ttl_s, poll_s = settings.lease_ttl_s, settings.poll_interval_s
    ends = AttemptEnds(
        table=lease_table,
        requeued=lambda items: dispatcher.offer(items),
        finished=lambda projects: wakeups.announce(("finished", project) for project in projects),
        left=seats.lease_over,
        observe_batch=metrics.batch,
    )
    returner = LeaseReturner(ends)
    dispatcher = Dispatcher(
        table=lease_table, seats=seats, undelivered=returner.give_back, poll_interval_s=poll_s, meter=metrics
    )
    rollouts = Rollouts(
        table=rollout_table,
        offer=dispatcher.offer,
        finished=lambda projects: wakeups.announce(("finished", project) for project in projects),
        tell=seats.tell_each,
        new_id=uuid7,
        now=lambda: datetime.datetime.now(datetime.UTC),
        observe_batch=metrics.batch,
    )
    sessions = Sessions(
        sessions=session_table, leases=lease_table, seats=seats, ends=ends, lease_ttl_s=ttl_s, new_id=uuid7
    )
    spans = Spans(table=span_table, observe_batch=metrics.batch)
    resources = Resources(table=resource_table, wakeups=wakeups)
    upkeep = Upkeep(table=PgUpkeep(database), today=lambda: datetime.datetime.now(datetime.UTC).date())
    await upkeep.work_once()
    metrics.watch_queue(known=lambda: len(dispatcher), credit=seats.open_credit, runners=lambda: len(seats))

    # Services
    rollout_service = RolloutService(
        rollouts=rollouts,
        table=rollout_table,
        feed=FeedFollower(table=PgFeed(database), wakeups=wakeups, poll_interval_s=poll_s),
        seats=seats,
        stopping=stopping.is_set,
    )
    lease_service = LeaseService(
        sessions=sessions,
        seats=seats,
        dispatcher=dispatcher,
        ends=ends,
        table=rollout_table,
        signer=TokenSigner(settings.signing_key.get_secret_value()),
        undelivered=returner.give_back,
        drain_notice_s=settings.drain_notice_s,
    )
    resource_service = ResourceService(
        resources=resources,
        watcher=ResourceWatcher(table=resource_table, wakeups=wakeups, poll_interval_s=poll_s),
        table=resource_table,
        rollouts=rollout_table,
        stopping=stopping.is_set,
    )

    def register(server: grpc.aio.Server) -> None:
        rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(rollout_service, server)
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(lease_service, server)
        resource_service_pb2_grpc.add_ResourceServiceServicer_to_server(resource_service, server)
        span_service_pb2_grpc.add_SpanServiceServicer_to_server(
            SpanService(spans=spans, table=span_table, rollouts=rollout_table), server
        )
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(TraceService(spans=spans), server)
        runner_registry_service_pb2_grpc.add_RunnerRegistryServiceServicer_to_server(
            RunnerRegistryService(table=session_table), server
        )
        project_service_pb2_grpc.add_ProjectServiceServicer_to_server(
            project_service_pb2_grpc.ProjectServiceServicer(), server
        )

    async def drain() -> None:
        stopping.set()
        wakeups.announce_all()
        seats.tell_each([(seat.session_id, Drained()) for seat in seats.all_open()])
        while len(seats):
            await asyncio.sleep(DRAIN_LOOK_S)

    return ServiceParts(
        server=build_server(settings, policy=ROLE_POLICY, service_names=SERVICE_NAMES, register=register),
        roles={
            "create-committer": rollouts.creations,
            "end-committer": ends.committer,
            "span-committer": spans.committer,
            "session-lookups": sessions.lookups,
            "dispatcher": dispatcher,
            "lease-returner": returner,
            "lease-renewer": LeaseRenewer(
                sessions=session_table, leases=lease_table, seats=seats, lease_ttl_s=ttl_s
            ),
            "lease-sweeper": LeaseSweeper(
                sessions=session_table, leases=lease_table, seats=seats, ends=ends, lease_ttl_s=ttl_s
            ),
            "upkeep": upkeep,
        },
        drain=drain,
    )


def _with_key(settings: StoreSettings) -> StoreSettings:
    """Gives a store in dev mode without a key one of its own, so that attempts get keys that it accepts."""
    if settings.signing_key.get_secret_value():
        return settings
    return settings.model_copy(update={"signing_key": SecretStr(secrets.token_urlsafe(32))})
