"""Runner sessions: opened, resumed, renewed, ended. A session's id is minted once and never used again.

Leases belong to a session and live as long as it does. Only the database's clock says when that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable, SessionEnded
from fulmen.ids import runner_name
from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.leases.attempt_ends import AttemptEnds
from fulmen_store.leases.leases import HeldLease, LeaseTable, SessionOwner
from fulmen_store.leases.table import SessionTable
from fulmen_store.periodic import Pace
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.runners.session_notes import SessionUpdates
from fulmen_store.scheduling.runner_streams import (
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
# The project of a session that the last release opened, until its runner goes on with it here.
UNBOUND: Final = ""
RENEWALS_PER_TTL: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A resumed session: its stream, and the attempts that the runner works on but no longer holds."""

    stream: RunnerStream
    lost: Sequence[tuple[UUID, int]]


class Sessions:
    """Opens and resumes sessions and streams their runners."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        leases: LeaseTable,
        streams: RunnerStreams,
        ends: AttemptEnds,
        lease_ttl_s: float,
        new_id: Callable[[], UUID],
    ) -> None:
        """Wires the use case; `lease_ttl_s` is how long a session lives without a sign of life."""
        self._sessions = sessions
        self._leases = leases
        self._streams = streams
        self._ends = ends
        self._new_id = new_id
        self.lease_ttl_s = lease_ttl_s
        # Many runners come back at once after a restart: one look at the live items serves them all.
        self.lookups: GroupCommitter[UUID, list[HeldLease]] = GroupCommitter("held_by", self._look_up)

    async def open(self, *, owner: SessionOwner, host: str, info: bytes) -> UUID:
        """Records a new session and returns its id."""
        session_id = self._new_id()
        await self._sessions.open(session_id, owner=owner, host=host, info=info, ttl_s=self.lease_ttl_s)
        return session_id

    def sit(self, session_id: UUID, *, labels: frozenset[str], projects: frozenset[int] | None) -> RunnerStream:
        """Gives a session a stream at this replica; a stream that it had here before is closed."""
        stream = RunnerStream(session_id=session_id, labels=labels, projects=projects)
        self._streams.take(stream)
        return stream

    async def resume(
        self,
        session_id: UUID,
        *,
        owner: SessionOwner,
        labels: frozenset[str],
        projects: frozenset[int] | None,
        running: frozenset[tuple[UUID, int]],
    ) -> Resumed:
        """RunnerStreams a session again; its unlisted leases are released, those asked to be cancelled are named.

        Raises:
            SessionEnded: if it is unknown or over.
        """
        await self.renew(session_id, owner=owner)
        stream = self.sit(session_id, labels=labels, projects=projects)
        (held,) = await self.lookups.submit([session_id])
        keys = {(lease.rollout_id, lease.epoch): lease for lease in held}
        unlisted = [lease for key, lease in keys.items() if key not in running]
        if unlisted:
            await self._ends.end_leases(unlisted, FailureKind.RELEASED)
        for rollout_id, epoch in running & keys.keys():
            stream.leases[rollout_id] = epoch
        cancelled = [key for key, lease in keys.items() if key in running and lease.cancel_requested]
        if cancelled:
            stream.tell(CancelRequested(attempts=cancelled))
        return Resumed(stream=stream, lost=sorted(running - keys.keys()))

    async def renew(self, session_id: UUID, *, owner: SessionOwner) -> None:
        """Extends a session at once.

        Raises:
            SessionEnded: if it is unknown or over.
        """
        if not await self._sessions.resume(session_id, owner=owner, ttl_s=self.lease_ttl_s):
            raise SessionEnded("The runner session is unknown or over: open a new one.", runner=runner_name(session_id))

    async def foreign(self, session_ids: Collection[UUID], *, project: str) -> frozenset[UUID]:
        """Returns those sessions that are not of tokens of this very project; unknown ones are among them."""
        projects = await self._sessions.projects_of(list(session_ids)) if session_ids else {}
        return frozenset(one for one in session_ids if projects.get(one) not in (project, UNBOUND))

    async def held(self, session_id: UUID) -> list[HeldLease]:
        """Returns the leases of a session."""
        (held,) = await self.lookups.submit([session_id])
        return held

    async def release(self, session_id: UUID, *, attempts: frozenset[tuple[UUID, int]] | None) -> int:
        """Gives leases back, or all of them and ends the session; returns how many were given back."""
        if attempts is None:
            await self._sessions.end([session_id])
        held = [
            lease
            for lease in await self.held(session_id)
            if attempts is None or (lease.rollout_id, lease.epoch) in attempts
        ]
        return await self._ends.end_leases(held, FailureKind.RELEASED) if held else 0

    async def _look_up(self, session_ids: Sequence[UUID]) -> list[list[HeldLease]]:
        found: dict[UUID, list[HeldLease]] = {session_id: [] for session_id in session_ids}
        for lease in await self._leases.held_by(list(found)):
            found[lease.session_id].append(lease)
        return [found[session_id] for session_id in session_ids]


class LeaseRenewer:
    """Background role: writes down the signs of life of all runners at once, and tells them what changed."""

    def __init__(
        self,
        *,
        sessions: SessionTable,
        leases: LeaseTable,
        streams: RunnerStreams,
        notes: SessionUpdates,
        lease_ttl_s: float,
    ) -> None:
        """Wires the role; it writes three times per TTL."""
        self._sessions = sessions
        self._leases = leases
        self._streams = streams
        self._notes = notes
        self._lease_ttl_s = lease_ttl_s
        self._missing: dict[UUID, set[tuple[UUID, int]]] = {}

    async def run(self) -> None:
        """Renews until it is cancelled."""
        pace = Pace(self._lease_ttl_s / RENEWALS_PER_TTL)
        while True:
            await pace.next()
            try:
                await self.renew_once()
            except DatabaseUnavailable:
                continue

    async def renew_once(self) -> None:
        """Renews the sessions heard since the last time; tells runners of cancelled and lost attempts."""
        heard = self._streams.drain_active()
        signs = self._notes.take(heard)
        try:
            alive = set(await self._sessions.renew(signs, ttl_s=self._lease_ttl_s)) if signs else set()
        except DatabaseUnavailable:
            self._notes.put_back(signs)
            for session_id in heard:
                self._streams.mark_active(session_id)
            raise
        for session_id in heard - alive:
            stream = self._streams.find(session_id)
            if stream is not None:
                stream.tell(StreamClosed())
        await self._compare()

    async def _compare(self) -> None:
        believed = {
            stream.session_id: {(rollout_id, epoch) for rollout_id, epoch in stream.leases.items()}
            for stream in self._streams.all_open()
            if stream.leases
        }
        if not believed:
            self._missing = {}
            return
        held: dict[UUID, set[tuple[UUID, int]]] = {}
        for lease in await self._leases.held_by(list(believed)):
            held.setdefault(lease.session_id, set()).add((lease.rollout_id, lease.epoch))
            if lease.cancel_requested:
                self._streams.send_each(
                    [(lease.session_id, CancelRequested(attempts=[(lease.rollout_id, lease.epoch)]))]
                )
        missing: dict[UUID, set[tuple[UUID, int]]] = {}
        for session_id, keys in believed.items():
            gone = keys - held.get(session_id, set())
            # An end may be under way right now: only what is missing twice in a row is lost.
            lost = gone & self._missing.get(session_id, set())
            self._tell_lost(session_id, lost)
            missing[session_id] = gone - lost
        self._missing = missing

    def _tell_lost(self, session_id: UUID, lost: set[tuple[UUID, int]]) -> None:
        stream = self._streams.find(session_id)
        if stream is None:
            return
        known = [key for key in sorted(lost) if stream.leases.get(key[0]) == key[1]]
        for rollout_id, _ in known:
            del stream.leases[rollout_id]
        if known:
            stream.tell(LeasesLost(attempts=known))


class LeaseSweeper:
    """Background role: ends sessions whose time is over, and every attempt whose session is gone."""

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
        """Wires the role; without expired sessions it looks for orphaned leases every `safety_net_s` seconds."""
        self._sessions = sessions
        self._leases = leases
        self._streams = streams
        self._ends = ends
        self._lease_ttl_s = lease_ttl_s
        self._safety_net_s = safety_net_s

    async def run(self) -> None:
        """Sweeps until it is cancelled."""
        interval_s = self._lease_ttl_s / RENEWALS_PER_TTL
        sweeps_per_net = max(1, round(self._safety_net_s / interval_s))
        count = 0
        # After a start, and after the database was away, runners get one TTL to be heard again.
        grace = True
        while True:
            await Pace(self._lease_ttl_s if grace else interval_s).next()
            try:
                await self.sweep_once(look_for_orphans=grace or count % sweeps_per_net == 0)
                grace = False
            except DatabaseUnavailable:
                grace = True
            count += 1

    async def sweep_once(self, *, look_for_orphans: bool = True) -> int:
        """Ends what is over; returns how many attempts were lost."""
        expired = await self._sessions.end_expired()
        for session_id in expired:
            stream = self._streams.find(session_id)
            if stream is not None:
                stream.tell(StreamClosed())
        lost = 0
        while expired or look_for_orphans:
            orphans = await self._leases.orphaned(SWEEP_PAGE)
            if orphans:
                lost += await self._ends.end_leases(orphans, FailureKind.LEASE_LOST)
            if len(orphans) < SWEEP_PAGE:
                break
        return lost
