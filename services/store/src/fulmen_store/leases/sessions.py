"""Runner sessions: open, resume, renew, release, expire. A session's id is never reused.

Leases belong to a session and live as long as it does. Only the database's clock decides when it expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable, SessionEnded
from fulmen.ids import runner_name, uuid7
from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.events import QueueEvents
from fulmen_store.leases.attempt_ends import AttemptEnds
from fulmen_store.leases.leases import HeldLease, LeasedAttempt, LeaseTable, SessionOwner
from fulmen_store.leases.table import SessionTable
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.runners.session_updates import SessionUpdates
from fulmen_store.scheduling.dispatcher import released
from fulmen_store.scheduling.runner_streams import (
    OUTBOX_BYTES,
    Assigned,
    CancelRequested,
    LeasesLost,
    RunnerStream,
    RunnerStreams,
    StreamClosed,
)

__all__ = [
    "LeaseRenewer",
    "LeaseSweeper",
    "Resumed",
    "Sessions",
]

SWEEP_PAGE: Final = 1000
RENEWALS_PER_TTL: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A resumed session: its stream, and the attempts that the runner still runs but no longer holds."""

    stream: RunnerStream
    lost: frozenset[LeasedAttempt]


class Sessions:
    """Opens and resumes sessions and their streams."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        leases: LeaseTable,
        streams: RunnerStreams,
        updates: SessionUpdates,
        ends: AttemptEnds,
        events: QueueEvents,
        lease_ttl_s: float,
    ) -> None:
        """Creates the use case.

        Args:
            sessions: Table of sessions.
            leases: Table of leases.
            streams: Streams of the runners connected here.
            updates: Session updates that the next renewal writes.
            ends: Use case that ends the attempts of released leases.
            events: Receiver of leases that were assigned to a stream but not sent.
            lease_ttl_s: Lifetime of a session without activity, seconds.
        """
        self._sessions = sessions
        self._leases = leases
        self._streams = streams
        self._updates = updates
        self._ends = ends
        self._events = events
        self.lease_ttl_s = lease_ttl_s
        # Many runners resume at the same time after a restart; one query serves them all.
        self.lookups: GroupCommitter[UUID, list[HeldLease]] = GroupCommitter("held_by", self._look_up)

    async def open(self, *, owner: SessionOwner, host: str, info: bytes) -> UUID:
        """Records a new session and returns its id."""
        session_id = uuid7()
        await self._sessions.open(session_id, owner=owner, host=host, info=info, ttl_s=self.lease_ttl_s)
        return session_id

    def attach(
        self,
        session_id: UUID,
        *,
        labels: frozenset[str],
        projects: frozenset[int] | None,
        room_bytes: int = OUTBOX_BYTES,
    ) -> RunnerStream:
        """Opens a stream for a session at this replica and closes the previous one.

        `room_bytes` is the size of assignments that can be sent to it now.
        """
        stream = RunnerStream(session_id=session_id, labels=labels, projects=projects, room_bytes=room_bytes)
        self._streams.attach(stream)
        return stream

    def detach(self, stream: RunnerStream) -> None:
        """Closes a stream; assignments that were not sent return to the queue."""
        self._streams.detach(stream)
        while (notice := stream.outbox.take()) is not None:
            if isinstance(notice, Assigned):
                self._events.leases_undelivered.emit(
                    [released(grant.attempt, grant.session_id) for grant in notice.grants]
                )

    def record_activity(self, session_id: UUID) -> None:
        """Marks a session as active; the next renewal extends it."""
        self._streams.mark_active(session_id)

    def record_load(self, session_id: UUID, load: bytes) -> None:
        """Records a runner's reported load; the next renewal writes it."""
        self._updates.load(session_id, load)

    async def resume(
        self,
        session_id: UUID,
        *,
        owner: SessionOwner,
        labels: frozenset[str],
        projects: frozenset[int] | None,
        running: frozenset[LeasedAttempt],
    ) -> Resumed:
        """Opens a new stream for a session; releases leases not in `running` and requests pending cancellations.

        Raises:
            SessionEnded: If it is unknown or has ended.
        """
        await self.renew(session_id, owner=owner)
        stream = self.attach(session_id, labels=labels, projects=projects)
        (held,) = await self.lookups.submit([session_id])
        keys = {lease.attempt: lease for lease in held}
        unlisted = [lease for key, lease in keys.items() if key not in running]
        if unlisted:
            await self._ends.end_leases(unlisted, FailureKind.RELEASED)
        for attempt in running & keys.keys():
            stream.leases[attempt.rollout_id] = attempt
        cancelled = [key for key, lease in keys.items() if key in running and lease.cancel_requested]
        if cancelled:
            stream.send(CancelRequested(attempts=cancelled))
        return Resumed(stream=stream, lost=running - keys.keys())

    async def renew(self, session_id: UUID, *, owner: SessionOwner) -> None:
        """Extends a session immediately.

        Raises:
            SessionEnded: If it is unknown or has ended.
        """
        if not await self._sessions.resume(session_id, owner=owner, ttl_s=self.lease_ttl_s):
            raise SessionEnded(
                "The runner session is unknown or has ended: open a new one.", runner=runner_name(session_id)
            )

    async def foreign(self, session_ids: Collection[UUID], *, project: str) -> frozenset[UUID]:
        """Returns the sessions that are unknown or not bound to this project."""
        projects = await self._sessions.projects_of(list(session_ids)) if session_ids else {}
        return frozenset(one for one in session_ids if projects.get(one) != project)

    async def held(self, session_id: UUID) -> list[HeldLease]:
        """Returns the leases of a session."""
        (held,) = await self.lookups.submit([session_id])
        return held

    async def release(self, session_id: UUID, *, attempts: frozenset[LeasedAttempt] | None) -> int:
        """Releases leases; without `attempts`, all of them, and ends the session. Returns the number released."""
        if attempts is None:
            await self._sessions.end([session_id])
        held = [lease for lease in await self.held(session_id) if attempts is None or lease.attempt in attempts]
        return await self._ends.end_leases(held, FailureKind.RELEASED) if held else 0

    async def _look_up(self, session_ids: Sequence[UUID]) -> list[list[HeldLease]]:
        found: dict[UUID, list[HeldLease]] = {session_id: [] for session_id in session_ids}
        for lease in await self._leases.held_by(list(found)):
            found[lease.session_id].append(lease)
        return [found[session_id] for session_id in session_ids]


class LeaseRenewer:
    """Background role: extends all active sessions with one query and notifies runners of cancelled and lost
    attempts."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        leases: LeaseTable,
        streams: RunnerStreams,
        updates: SessionUpdates,
        lease_ttl_s: float,
    ) -> None:
        self._sessions = sessions
        self._leases = leases
        self._streams = streams
        self._updates = updates
        self._lease_ttl_s = lease_ttl_s
        self._missing: dict[UUID, set[LeasedAttempt]] = {}

    async def run(self) -> None:
        """Renews until cancelled."""
        while True:
            await asyncio.sleep(self._lease_ttl_s / RENEWALS_PER_TTL)
            try:
                await self.renew_once()
            except DatabaseUnavailable:
                continue

    async def renew_once(self) -> None:
        """Renews the sessions active since the last call; notifies runners of cancelled and lost attempts."""
        active = self._streams.drain_active()
        signs = self._updates.drain(active)
        try:
            alive = set(await self._sessions.renew(signs, ttl_s=self._lease_ttl_s)) if signs else set()
        except DatabaseUnavailable:
            self._updates.restore(signs)
            for session_id in active:
                self._streams.mark_active(session_id)
            raise
        for session_id in active - alive:
            stream = self._streams.find(session_id)
            if stream is not None:
                stream.send(StreamClosed())
        await self._compare()

    async def _compare(self) -> None:
        believed = {
            stream.session_id: set(stream.leases.values()) for stream in self._streams.all_open() if stream.leases
        }
        if not believed:
            self._missing = {}
            return
        held: dict[UUID, set[LeasedAttempt]] = {}
        for lease in await self._leases.held_by(list(believed)):
            held.setdefault(lease.session_id, set()).add(lease.attempt)
            if lease.cancel_requested:
                self._streams.send_each([(lease.session_id, CancelRequested(attempts=[lease.attempt]))])
        missing: dict[UUID, set[LeasedAttempt]] = {}
        for session_id, keys in believed.items():
            gone = keys - held.get(session_id, set())
            # An end may be in progress, so only a lease missing twice in a row is lost.
            lost = gone & self._missing.get(session_id, set())
            self._send_lost(session_id, lost)
            missing[session_id] = gone - lost
        self._missing = missing

    def _send_lost(self, session_id: UUID, lost: set[LeasedAttempt]) -> None:
        stream = self._streams.find(session_id)
        if stream is None:
            return
        known = [attempt for attempt in sorted(lost) if stream.leases.get(attempt.rollout_id) == attempt]
        for attempt in known:
            del stream.leases[attempt.rollout_id]
        if known:
            stream.send(LeasesLost(attempts=known))


class LeaseSweeper:
    """Background role: ends expired sessions and the attempts of ended ones."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        leases: LeaseTable,
        streams: RunnerStreams,
        ends: AttemptEnds,
        lease_ttl_s: float,
        safety_net_s: float = 60.0,
    ) -> None:
        """Creates the role.

        Args:
            sessions: Table of sessions.
            leases: Table of leases.
            streams: Streams of the runners connected here.
            ends: Use case that ends attempts.
            lease_ttl_s: Lifetime of a session without activity, seconds.
            safety_net_s: Interval of searches for orphaned leases without an expired session, seconds; 60 by default.
        """
        self._sessions = sessions
        self._leases = leases
        self._streams = streams
        self._ends = ends
        self._lease_ttl_s = lease_ttl_s
        self._safety_net_s = safety_net_s

    async def run(self) -> None:
        """Sweeps until cancelled."""
        interval_s = self._lease_ttl_s / RENEWALS_PER_TTL
        sweeps_per_net = max(1, round(self._safety_net_s / interval_s))
        count = 0
        # After a start or a database outage, runners get one TTL to become active again.
        grace = True
        while True:
            await asyncio.sleep(self._lease_ttl_s if grace else interval_s)
            try:
                # A clock that was set ahead ends all leases; runners get one TTL to renew them.
                if not await self._sessions.clock_has_run_for(self._lease_ttl_s):
                    continue
                await self.sweep_once(look_for_orphans=grace or count % sweeps_per_net == 0)
                grace = False
            except DatabaseUnavailable:
                grace = True
            count += 1

    async def sweep_once(self, *, look_for_orphans: bool = True) -> int:
        """Ends expired sessions and orphaned attempts; returns the number of lost attempts."""
        expired = await self._sessions.end_expired()
        for session_id in expired:
            stream = self._streams.find(session_id)
            if stream is not None:
                stream.send(StreamClosed())
        lost = 0
        while expired or look_for_orphans:
            orphans = await self._leases.orphaned(SWEEP_PAGE)
            if orphans:
                lost += await self._ends.end_leases(orphans, FailureKind.LEASE_LOST)
            if len(orphans) < SWEEP_PAGE:
                break
        return lost
