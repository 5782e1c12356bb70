"""Notifications between replicas, which save waiting for the next poll.

Invariant: a notification is a hint. It may be lost, repeated or wrong; it decides when a replica polls, never the
result.

At most one notification is in flight per peer; events during it are sent with the next one, and empty ones are not
sent. A notification is never retried, and a peer that missed one is skipped until the next membership poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import structlog

from fulmen.ids import AttemptName
from fulmen_store.leases.leases import LeaseTable
from fulmen_store.projects.names import ProjectNames
from fulmen_store.replicas.live_replicas import LiveReplicas, Replica
from fulmen_store.replicas.notifications import MAX_CANCELS, MAX_ORDERED, CancelHint, Notification
from fulmen_store.replicas.peer_client import PeerClient, PeerUnreachableError
from fulmen_store.replicas.wakeups import PROJECTS_CHANGED, Wakeups
from fulmen_store.rollouts.feed_watch import FeedWatch
from fulmen_store.runners.orders import RunnerOrders
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.runner_streams import CancelRequested, Notice, RunnerStreams

__all__ = [
    "NotificationReceiver",
    "NotificationSender",
]

# Under load, events of this interval share a notification, which costs as much CPU as about twenty rollouts.
SEND_INTERVAL_S: Final = 0.01

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class _PeerState:
    """The pending notification of one peer."""

    notification: Notification = field(default_factory=Notification)
    sender: asyncio.Task[None] | None = None
    skipped_at_poll: int = -1


class NotificationSender:
    """Background role: collects this replica's events and notifies every live peer."""

    def __init__(
        self,
        *,
        replicas: LiveReplicas,
        client: PeerClient,
        streams: RunnerStreams,
        projects: ProjectNames,
        enabled: bool = True,
    ) -> None:
        """Creates the role; unless `enabled`, nothing is sent and the peers rely on polls."""
        self._replicas = replicas
        self._client = client
        self._streams = streams
        self._projects = projects
        self._enabled = enabled
        self._pending = Notification()
        self._arrived = asyncio.Event()
        self._peers: dict[UUID, _PeerState] = {}

    def work_unmatched(self, projects: Iterable[int]) -> None:
        """Records projects with waiting rollouts for which no runner here has credit."""
        self._pending.ready.update(projects)
        self._arrived.set()

    def rollouts_finished(self, projects: Iterable[int]) -> None:
        """Records projects in which rollouts became final."""
        self._pending.finished.update(projects)
        self._arrived.set()

    def runner_ordered(self, session_id: UUID) -> None:
        """Records a runner that has an order and is not connected here; of more than 1,000 the polls know."""
        if len(self._pending.ordered) < MAX_ORDERED:
            self._pending.ordered.add(session_id)
            self._arrived.set()

    def announced(self, keys: Iterable[Hashable]) -> None:
        """Records the wake-up keys announced here: resources and projects."""
        for key in keys:
            match key:
                case ("resources", int(project_id)):
                    self._pending.resources.add(project_id)
                case ("projects",):
                    self._pending.projects_changed = True
                case _:
                    continue
            self._arrived.set()

    def send_each(self, notices: Sequence[tuple[UUID, Notice]]) -> None:
        """Sends notices to the runners connected here; cancellations for other sessions go to the peers."""
        for session_id, notice in notices:
            stream = self._streams.find(session_id)
            if stream is not None:
                stream.send(notice)
            elif isinstance(notice, CancelRequested) and len(self._pending.cancels) < MAX_CANCELS:
                self._pending.cancels += [
                    CancelHint(
                        session_id=session_id,
                        attempt=AttemptName(
                            project=self._projects.name(one.project_id), rollout_id=one.rollout_id, number=one.epoch
                        ),
                    )
                    for one in notice.attempts
                ]
                self._arrived.set()

    async def run(self) -> None:
        """Sends until cancelled."""
        async with asyncio.TaskGroup() as senders:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                notification, self._pending = self._pending, Notification()
                if self._enabled:
                    await self._distribute(notification, senders)

    async def _distribute(self, notification: Notification, senders: asyncio.TaskGroup) -> None:
        peers = {peer.replica_id: peer for peer in self._replicas.others}
        if self._peers.keys() - peers.keys():
            self._peers = {replica_id: state for replica_id, state in self._peers.items() if replica_id in peers}
            await self._client.keep_only([peer.address for peer in peers.values()])
        for peer in peers.values():
            state = self._peers.setdefault(peer.replica_id, _PeerState())
            if state.skipped_at_poll == self._replicas.polls:
                continue
            state.notification.add(notification)
            if state.sender is None or state.sender.done():
                state.sender = senders.create_task(self._send(peer, state), name=f"notify-{peer.address}")

    async def _send(self, peer: Replica, state: _PeerState) -> None:
        while state.notification:
            notification, state.notification = state.notification, Notification()
            try:
                await self._client.notify(peer.address, notification)
            except PeerUnreachableError as error:
                _log.info("peer_unreachable", address=peer.address, reason=str(error))
                state.notification, state.skipped_at_poll = Notification(), self._replicas.polls
                return
            await asyncio.sleep(SEND_INTERVAL_S)


class NotificationReceiver:
    """Handles notifications from other replicas: wakes waiters, and checks the table before it cancels an attempt."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        feed: FeedWatch,
        wakeups: Wakeups,
        leases: LeaseTable,
        streams: RunnerStreams,
        orders: RunnerOrders,
    ) -> None:
        """Creates the use case.

        Args:
            dispatcher: Dispatcher that reads waiting rollouts.
            feed: Role that looks for finished rollouts.
            wakeups: Wake-ups of watchers of resources and projects.
            leases: Table in which cancellations are checked.
            streams: Streams of the runners connected here.
            orders: Role that passes orders to runners.
        """
        self._orders = orders
        self._dispatcher = dispatcher
        self._feed = feed
        self._wakeups = wakeups
        self._leases = leases
        self._streams = streams

    async def receive(self, notification: Notification) -> None:
        """Handles a notification.

        Raises:
            DatabaseUnavailable: If a cancellation could not be checked.
        """
        if notification.ready:
            self._dispatcher.hint(frozenset(notification.ready))
        self._feed.hint(notification.finished)
        self._orders.hint(notification.ordered)
        self._wakeups.wake(
            [
                *(("resources", project) for project in notification.resources),
                *([PROJECTS_CHANGED] if notification.projects_changed else []),
            ]
        )
        connected = {
            (hint.session_id, hint.attempt.rollout_id)
            for hint in notification.cancels
            if self._streams.find(hint.session_id)
        }
        if not connected:
            return
        for lease in await self._leases.held(sorted({rollout_id for _, rollout_id in connected})):
            if lease.cancel_requested and (lease.session_id, lease.rollout_id) in connected:
                self._streams.send_each([(lease.session_id, CancelRequested(attempts=[lease.attempt]))])
