"""The parts of the store that have to do with the queue, put together: use cases, roles and what they share."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fulmen.ids import uuid7, uuid7s
from fulmen_service_kit.lifecycle import Role
from fulmen_service_kit.own_traces import own_traces
from fulmen_service_kit.revocation import RevocationFollower, RevokedTokens
from fulmen_store.leases.attempt_ends import AttemptEnds, LeaseReturner
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.leases.overdue import OverdueReaper
from fulmen_store.leases.sessions import LeaseRenewer, LeaseSweeper, Sessions
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.projects import ProjectFollower
from fulmen_store.replicas.live_replicas import LiveReplicas
from fulmen_store.replicas.notifier import NotificationReceiver, NotificationSender
from fulmen_store.replicas.peer_client import PeerClient
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.resources.garbage import ResourceGarbageCollector
from fulmen_store.resources.lifetimes import ExpiringVersions
from fulmen_store.retention.upkeep import Maintenance
from fulmen_store.rollouts.rollouts import Rollouts
from fulmen_store.runners.fleet_demand import FleetDemand
from fulmen_store.runners.registry import FleetWatcher
from fulmen_store.runners.session_notes import SessionUpdates
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.durations import DurationTracker
from fulmen_store.scheduling.hedging import Hedger
from fulmen_store.scheduling.quotas import QueueQuotas
from fulmen_store.scheduling.runner_streams import LeasesLost, RunnerStreams
from fulmen_store.settings import StoreSettings
from fulmen_store.span_parts import SpanParts, wire_spans
from fulmen_store.table_parts import Tables
from fulmen_store.traces import RolloutTraces
from fulmen_store.transport.rollout_codec import explained
from fulmen_store.usage.usage_keeper import UsageRetention

__all__ = ["Queue", "roles", "wire_queue"]

RESOURCE_GC_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Use cases, background roles and what they share."""

    streams: RunnerStreams
    wakeups: Wakeups
    stopping: asyncio.Event
    ends: AttemptEnds
    returner: LeaseReturner
    dispatcher: Dispatcher
    durations: DurationTracker
    notes: SessionUpdates
    board: FleetWatcher
    demand: FleetDemand
    overdue: OverdueReaper
    rollouts: Rollouts
    sessions: Sessions
    spans: SpanParts
    upkeep: Maintenance
    revoked: RevokedTokens
    replicas: LiveReplicas
    news: NotificationSender
    listener: NotificationReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the use cases of the queue have in common."""

    metrics: StoreMetrics
    streams: RunnerStreams
    replicas: LiveReplicas
    news: NotificationSender
    wakeups: Wakeups
    durations: DurationTracker
    notes: SessionUpdates
    traces: RolloutTraces | None

    def finished(self, projects: frozenset[int]) -> None:
        """Wakes who waits for finished rollouts of projects."""
        self.wakeups.announce(("finished", project) for project in projects)


def _wire_leases(
    tables: Tables, settings: StoreSettings, shared: _Shared
) -> tuple[AttemptEnds, LeaseReturner, Dispatcher]:
    """Makes what hands leases out and what ends them: each tells the other."""

    def ended(attempts: Sequence[EndedAttempt]) -> None:
        shared.durations.learn(attempts)
        shared.notes.ended(attempts)
        if shared.traces is not None:
            shared.traces.ended(attempts)
        dispatcher.freed(one.item.project_id for one in attempts)
        for one in attempts:
            if one.superseded is not None:
                session_id, epoch = one.superseded
                shared.streams.lease_over(session_id, one.item.rollout_id)
                shared.news.send_each([(session_id, LeasesLost(attempts=[(one.item.rollout_id, epoch)]))])

    ends = AttemptEnds(
        table=tables.leases,
        requeued=lambda items: dispatcher.offer(items),
        finished=shared.finished,
        left=shared.streams.lease_over,
        ended=ended,
        observe_batch=shared.metrics.batch,
    )
    returner = LeaseReturner(ends)
    dispatcher = Dispatcher(
        table=tables.leases,
        streams=shared.streams,
        undelivered=returner.give_back,
        poll_interval_s=settings.poll_interval_s,
        meter=shared.metrics,
        predicted_s=shared.durations.predicted_s,
        place=shared.replicas.place,
        unmatched=shared.news.ready,
    )
    return ends, returner, dispatcher


def wire_queue(tables: Tables, settings: StoreSettings, peers: PeerClient) -> Queue:
    """Makes the use cases and what they share."""
    metrics, streams, replicas = StoreMetrics(), RunnerStreams(), LiveReplicas(uuid7())
    own = own_traces()
    traces = None if own is None else RolloutTraces(own)
    news = NotificationSender(replicas=replicas, client=peers, streams=streams, enabled=settings.notify_peers)
    wakeups = Wakeups(announced=news.announced)
    shared = _Shared(
        metrics=metrics,
        streams=streams,
        replicas=replicas,
        news=news,
        wakeups=wakeups,
        durations=DurationTracker(tables.durations),
        notes=SessionUpdates(),
        traces=traces,
    )
    ends, returner, dispatcher = _wire_leases(tables, settings, shared)
    metrics.watch_database(lambda: int(tables.database.is_up))
    demand = FleetDemand(table=tables.demand, durations=tables.durations)
    metrics.watch_demand(demand.shown)
    metrics.watch_queue(known=lambda: len(dispatcher), credit=streams.open_credit, runners=lambda: len(streams))
    return Queue(
        streams=streams,
        wakeups=wakeups,
        stopping=asyncio.Event(),
        ends=ends,
        returner=returner,
        dispatcher=dispatcher,
        durations=shared.durations,
        notes=shared.notes,
        board=FleetWatcher(table=tables.runners),
        demand=demand,
        overdue=OverdueReaper(
            table=tables.overdue,
            ends=ends,
            tell=news.send_each,
            finished=shared.finished,
            explain=explained,
            attempt_grace_s=settings.attempt_grace_s,
            lease_ttl_s=settings.lease_ttl_s,
        ),
        rollouts=Rollouts(
            table=tables.rollouts,
            versions=ExpiringVersions(tables.resources),
            dispatcher=dispatcher,
            finished=shared.finished,
            tell=news.send_each,
            admit=QueueQuotas(tables.queue_stats.queued).admit,
            new_ids=uuid7s,
            now=_now,
            cancel_grace_s=settings.cancel_grace_s,
            observe_batch=metrics.batch,
        ),
        sessions=Sessions(
            sessions=tables.sessions,
            leases=tables.leases,
            streams=streams,
            ends=ends,
            lease_ttl_s=settings.lease_ttl_s,
            new_id=uuid7,
        ),
        spans=wire_spans(tables.database, settings, rollouts=tables.rollouts, metrics=metrics, traces=traces),
        upkeep=Maintenance(table=tables.upkeep, today=lambda: _now().date()),
        revoked=RevokedTokens(),
        replicas=replicas,
        news=news,
        listener=NotificationReceiver(look=dispatcher.look, wakeups=wakeups, leases=tables.leases, streams=streams),
    )


def roles(tables: Tables, queue: Queue, lease_ttl_s: float) -> dict[str, Role]:
    """Returns the background roles by name."""
    return {
        "create-committer": queue.rollouts.creations,
        "end-committer": queue.ends.committer,
        "session-lookups": queue.sessions.lookups,
        "dispatcher": queue.dispatcher,
        "durations": queue.durations,
        "hedger": Hedger(table=tables.leases, dispatcher=queue.dispatcher, sketch=queue.durations.sketch),
        "lease-returner": queue.returner,
        "lease-renewer": LeaseRenewer(
            sessions=tables.sessions,
            leases=tables.leases,
            streams=queue.streams,
            notes=queue.notes,
            lease_ttl_s=lease_ttl_s,
        ),
        "runner-board": queue.board,
        "fleet-demand": queue.demand,
        "lease-sweeper": LeaseSweeper(
            sessions=tables.sessions,
            leases=tables.leases,
            streams=queue.streams,
            ends=queue.ends,
            lease_ttl_s=lease_ttl_s,
        ),
        "overdue": queue.overdue,
        "resource-collector": ResourceGarbageCollector(table=tables.garbage, interval_s=RESOURCE_GC_INTERVAL_S),
        "upkeep": queue.upkeep,
        "usage-keeper": UsageRetention(table=tables.usage),
        "project-follower": ProjectFollower(
            read=tables.leases.projects, tell=queue.dispatcher.update_project, wakeups=queue.wakeups
        ),
        "revocations": RevocationFollower(revoked=queue.revoked, fetch=tables.tokens.revoked),
        "news-teller": queue.news,
    }


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
