"""Use cases and background roles of the queue, and what they share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from fulmen.ids import ALL_PROJECTS, uuid7
from fulmen_service_kit.lifecycle import Role
from fulmen_service_kit.observability.own_traces import own_traces
from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.own_token import OwnToken
from fulmen_service_kit.security.revocation import RevocationFollower, RevokedTokens
from fulmen_service_kit.security.tokens import TokenSigner
from fulmen_store.budgets import UsedUpBudgets
from fulmen_store.database.database import Database
from fulmen_store.events import QueueEvents
from fulmen_store.leases.attempt_ends import AttemptEnds, LeaseReturner
from fulmen_store.leases.clock_mender import ClockMender
from fulmen_store.leases.overdue import OverdueReaper
from fulmen_store.leases.sessions import LeaseRenewer, LeaseSweeper, Sessions
from fulmen_store.leases.table import OverdueTable, PgLeaseTable, SessionTable
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.names import ProjectNames
from fulmen_store.projects.projects import ProjectFollower
from fulmen_store.projects.table import TokenTable
from fulmen_store.replicas.live_replicas import LiveReplicas
from fulmen_store.replicas.notifier import NotificationReceiver, NotificationSender
from fulmen_store.replicas.peer_client import PeerClient
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.resources.garbage_collection import ResourceGarbageCollector
from fulmen_store.resources.lifetimes import ExpiringVersions
from fulmen_store.resources.table import GarbageTable, ResourceTable
from fulmen_store.retention.retention import Maintenance
from fulmen_store.retention.table import UpkeepTable
from fulmen_store.rollouts.feed_watch import FeedWatch
from fulmen_store.rollouts.rollouts import Rollouts
from fulmen_store.rollouts.table import FeedTable, RolloutTable
from fulmen_store.run_leases.table import RunLeaseTable
from fulmen_store.run_leases.unowned import UnownedRuns
from fulmen_store.runners.fleet import FleetWatcher
from fulmen_store.runners.fleet_demand import FleetDemand
from fulmen_store.runners.orders import RunnerOrders
from fulmen_store.runners.session_updates import SessionUpdates
from fulmen_store.runners.table import OrderTable, RunnerTable
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.durations import DurationTracker
from fulmen_store.scheduling.hedging import Hedger
from fulmen_store.scheduling.queue_stats import StatsCache
from fulmen_store.scheduling.quotas import QueueQuotas
from fulmen_store.scheduling.runner_streams import RunnerStreams
from fulmen_store.scheduling.table import DemandTable, DurationTable, QueueStatsTable
from fulmen_store.settings import StoreSettings
from fulmen_store.traces import RolloutTraces

__all__ = ["Queue"]


class Queue:
    """The parts of the queue."""

    def __init__(self, database: Database, settings: StoreSettings, keys: StoreKeys, stack: AsyncExitStack) -> None:
        """Creates the parts; pushes what has to be closed onto the stack."""
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
        self.session_table = SessionTable(database, metrics)
        stats, durations = QueueStatsTable(database), DurationTable(database)

        # Scheduling: which rollout is assigned to which runner.
        self.durations = DurationTracker(durations)
        self.stats = StatsCache(stats)
        self.dispatcher = Dispatcher(
            table=leases, streams=streams, events=events, poll_interval_s=settings.poll_interval_s,
            replicas=replicas, durations=self.durations, metrics=metrics,
        )  # fmt: skip
        # Leases: how attempts end, and the sessions that hold leases.
        self.ends = AttemptEnds(table=leases, events=events, metrics=metrics)
        self.returner = LeaseReturner(self.ends)
        self.updates = SessionUpdates()
        self.sessions = Sessions(
            sessions=self.session_table, leases=leases, streams=streams, updates=self.updates, ends=self.ends,
            events=events, lease_ttl_s=settings.lease_ttl_s,
        )  # fmt: skip
        # Rollouts: creation and cancellation.
        self.used_up = UsedUpBudgets()
        self.rollouts = Rollouts(
            table=rollouts, versions=ExpiringVersions(self.resource_table), quotas=QueueQuotas(stats, used_up=self.used_up),
            dispatcher=self.dispatcher, events=events, cancel_grace_s=settings.cancel_grace_s, metrics=metrics,
        )  # fmt: skip
        self.feed_table = FeedTable(database)
        self.feed_watch = FeedWatch(table=self.feed_table, poll_interval_s=settings.poll_interval_s)
        # Runners and replicas.
        self.runners = RunnerTable(database, project_names)
        self.fleet = FleetWatcher(table=self.runners)
        self.orders = RunnerOrders(table=OrderTable(database), streams=streams)
        self.demand = FleetDemand(table=DemandTable(database), durations=durations)
        own_token = OwnToken(self.signer, subject="store-replica", project=ALL_PROJECTS)
        peers = PeerClient(own_token, tls=settings.sibling_tls())
        stack.push_async_callback(peers.close)
        self.sender = NotificationSender(
            replicas=replicas, client=peers, streams=streams, projects=project_names, enabled=settings.notify_peers
        )
        self.receiver = NotificationReceiver(
            dispatcher=self.dispatcher, feed=self.feed_watch, wakeups=wakeups, leases=leases, streams=streams,
            orders=self.orders,
        )  # fmt: skip
        self._subscribe(database)
        self.roles = self._roles(database, settings)

    def _roles(self, database: Database, settings: StoreSettings) -> dict[str, Role]:
        """Returns what works in the background: some of the parts, and what nothing else calls."""
        leases, streams, sessions = self.leases, self.streams, self.session_table
        lease_ttl_s = settings.lease_ttl_s
        return {
            "create-committer": self.rollouts.creations,
            "end-committer": self.ends.committer,
            "session-lookups": self.sessions.lookups,
            "dispatcher": self.dispatcher,
            "feed-watch": self.feed_watch,
            "durations": self.durations,
            "hedger": Hedger(table=leases, dispatcher=self.dispatcher, durations=self.durations),
            "lease-returner": self.returner,
            "lease-renewer": LeaseRenewer(
                sessions=sessions, leases=leases, streams=streams, updates=self.updates, lease_ttl_s=lease_ttl_s
            ),
            "lease-sweeper": LeaseSweeper(
                sessions=sessions, leases=leases, streams=streams, ends=self.ends, lease_ttl_s=lease_ttl_s
            ),
            "clock-mender": ClockMender(database, self.dispatcher, lease_ttl_s, settings.cancel_grace_s),
            "overdue": OverdueReaper(
                table=OverdueTable(database, self.project_names),
                ends=self.ends,
                events=self.events,
                attempt_grace_s=settings.attempt_grace_s,
                lease_ttl_s=lease_ttl_s,
            ),
            "fleet-watcher": self.fleet,
            "fleet-demand": self.demand,
            "runner-orders": self.orders,
            "resource-collector": ResourceGarbageCollector(table=GarbageTable(database)),
            "maintenance": Maintenance(table=UpkeepTable(database)),
            "project-follower": ProjectFollower(leases, self.dispatcher, self.wakeups, self.metrics),
            "revocations": RevocationFollower(revoked=self.revoked, fetch=TokenTable(database).revoked),
            "notification-sender": self.sender,
            "unowned-runs": UnownedRuns(
                RunLeaseTable(database), self.rollouts, settings.unowned_run_limit_s, self.metrics
            ),
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
        self.orders.ordered.subscribe(self.sender.runner_ordered)
        self.wakeups.announced.subscribe(self.sender.announced)
        metrics.watch_database(lambda: int(database.is_writable))
        metrics.watch_demand(self.demand.shown)
        metrics.watch_forecasts(self.demand.forecast_totals)
        metrics.watch_feed(lambda: self.feed_watch.lag_s)
        metrics.watch_queue(
            known=lambda: len(self.dispatcher),
            credit=self.streams.open_credit,
            runners=lambda: len(self.streams),
        )
