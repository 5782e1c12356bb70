"""A lease table in memory: a second implementation of the store's `LeaseTable`, for tests of its users."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from fulmen_store.leases.leases import (
    AttemptEnd,
    EndedAttempt,
    EndedReport,
    Grant,
    HedgeCandidate,
    HeldLease,
    LeaseTable,
    Project,
    QuotaClaim,
)
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind, RetryPolicy
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.rules import QueueTerms

__all__ = ["REQUEST", "MemoryLeaseTable"]

REQUEST = b"request"


@dataclass(slots=True)
class _Row:
    item: ReadyItem
    policy: RetryPolicy
    run_at: float = 0.0
    epoch: int = 0
    charged: int = 0
    session_id: UUID | None = None
    cancel_requested: bool = False
    granted: int = 0
    leased_at: float = 0.0
    hedged: bool = False
    hedge: tuple[UUID, int] | None = None

    def grant(self, session_id: UUID) -> Grant:
        """Grants the next epoch."""
        self.granted += 1
        return Grant(
            rollout_id=self.item.rollout_id,
            session_id=session_id,
            epoch=self.granted,
            project_id=self.item.project_id,
            request=REQUEST,
        )

    def ended(self, end: AttemptEnd, superseded: tuple[UUID, int] | None = None) -> EndedAttempt:
        """Returns what is told of an end."""
        return EndedAttempt(
            item=self.item,
            session_id=end.report.session_id,
            epoch=end.report.epoch,
            kind=end.report.kind,
            rollout_state=end.rollout_state,
            superseded=superseded,
        )


@dataclass(slots=True)
class MemoryLeaseTable:
    """Keeps live rollouts in a dictionary; `over` are the sessions that have ended."""

    rows: dict[UUID, _Row] = field(default_factory=dict)
    ends: dict[tuple[UUID, int], EndedReport] = field(default_factory=dict)
    over: set[UUID] = field(default_factory=set)
    max_running: int | None = None

    def add(self, item: ReadyItem, policy: RetryPolicy, *, hedged: bool = False) -> None:
        """Adds a waiting rollout."""
        self.rows[item.rollout_id] = _Row(item, policy, hedged=hedged)

    async def hedgeable(self, project_ids: Sequence[int], limit: int) -> list[HedgeCandidate]:
        """Returns attempts of rollouts that ask to be hedged and are not, the oldest first."""
        return [
            HedgeCandidate(item=row.item, session_id=row.session_id, age_s=time.monotonic() - row.leased_at)
            for row in sorted(self.rows.values(), key=lambda row: row.leased_at)
            if row.item.project_id in project_ids
            and row.hedged
            and row.session_id is not None
            and row.hedge is None
            and not row.cancel_requested
        ][:limit]

    async def claim_hedges(self, choices: Sequence[tuple[UUID, UUID, float]]) -> list[Grant]:
        """Gives each (rollout, session) a second lease if the first one is still held, by another, for so many seconds."""
        able = {one.item.rollout_id: one for one in await self.hedgeable([1, 2, 3], len(self.rows))}
        grants = []
        for rollout_id, session_id, min_age_s in choices:
            one = able.pop(rollout_id, None)
            if one is None or one.session_id == session_id or one.age_s < min_age_s:
                continue
            row = self.rows[rollout_id]
            grants.append(row.grant(session_id))
            row.hedge = session_id, row.granted
        return grants

    async def end_hedged(self, ends: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        """Writes ends of attempts beside which another one runs."""
        written = []
        for end in ends:
            report, row = end.report, self.rows.get(end.report.rollout_id)
            if row is None or row.hedge is None or row.session_id is None:
                continue
            first, own = (row.session_id, row.epoch), (report.session_id, report.epoch)
            if own not in (first, row.hedge) or row.cancel_requested != end.cancel_requested:
                continue
            if row.item.project_id != report.project_id:
                continue
            rival = row.hedge if own == first else first
            self._note(row, own, report.kind, report.report)
            decided = end.rollout_state in FINAL_STATES
            if decided:
                self._note(row, rival, FailureKind.SUPERSEDED, b"")
                del self.rows[report.rollout_id]
            else:
                (row.session_id, row.epoch), row.hedge = rival, None
            written.append(row.ended(end, superseded=rival if decided else None))
        return written

    def _note(self, row: _Row, lease: tuple[UUID, int], kind: FailureKind, report: bytes) -> None:
        item = row.item
        self.ends[item.rollout_id, lease[1]] = EndedReport(
            project_id=item.project_id,
            rollout_id=item.rollout_id,
            epoch=lease[1],
            session_id=lease[0],
            kind=kind,
            report=report,
        )

    async def claim(self, choices: Sequence[tuple[UUID, UUID]]) -> list[Grant]:
        """Gives each (rollout, session) pair a lease if the rollout waits."""
        grants = []
        for rollout_id, session_id in choices:
            row = self.rows.get(rollout_id)
            if row is None or row.session_id is not None or row.run_at > time.monotonic():
                continue
            grants.append(row.grant(session_id))
            row.session_id, row.epoch, row.leased_at = session_id, row.granted, time.monotonic()
        return grants

    async def claim_within(self, project_id: int, choices: Sequence[tuple[UUID, UUID]]) -> QuotaClaim:
        """Claims rollouts of one project in order, as many as its quota leaves room for."""
        running = sum(row.session_id is not None and row.item.project_id == project_id for row in self.rows.values())
        room = len(choices) if self.max_running is None else max(0, self.max_running - running)
        grants = await self.claim(choices[:room])
        return QuotaClaim(tried=min(room, len(choices)), grants=grants, room=room - len(grants))

    async def held(self, rollout_ids: Sequence[UUID]) -> list[HeldLease]:
        """Returns the leases on these rollouts."""
        wanted = set(rollout_ids)
        return [lease for lease in self._leases() if lease.rollout_id in wanted]

    async def held_by(self, session_ids: Sequence[UUID]) -> list[HeldLease]:
        """Returns the leases of these sessions."""
        return [lease for lease in self._leases() if lease.session_id in set(session_ids)]

    async def orphaned(self, limit: int) -> list[HeldLease]:
        """Returns leases whose session is over."""
        return [lease for lease in self._leases() if lease.session_id in self.over][:limit]

    async def end(self, ends: Sequence[AttemptEnd]) -> list[EndedAttempt]:
        """Writes those ends whose lease is unchanged."""
        written = []
        for end in ends:
            report, row = end.report, self.rows.get(end.report.rollout_id)
            if row is None or (row.item.project_id, row.session_id, row.epoch, row.cancel_requested, row.hedge) != (
                report.project_id,
                report.session_id,
                report.epoch,
                end.cancel_requested,
                None,
            ):
                continue
            if end.rollout_state in FINAL_STATES:
                del self.rows[report.rollout_id]
            else:
                row.session_id, row.cancel_requested = None, False
                row.charged += end.charge
                row.run_at = time.monotonic() + end.delay_s
            self._note(row, (report.session_id, report.epoch), report.kind, report.report)
            written.append(row.ended(end))
        return written

    async def ended(self, keys: Sequence[tuple[UUID, int]]) -> list[EndedReport]:
        """Returns the stored ends of attempts."""
        return [self.ends[key] for key in keys if key in self.ends]

    async def projects(self) -> list[Project]:
        """Returns all projects."""
        return [Project(project_id=1, name="projects/default", terms=QueueTerms(max_running=self.max_running))]

    async def oldest(self, project_id: int, *, per_priority: int) -> list[tuple[ReadyItem, float]]:
        """Returns the oldest waiting items of each sort_priority."""
        page = await self.waiting(project_id, after=(-(2**15), UUID(int=0)), limit=len(self.rows))
        priorities: dict[int, list[tuple[ReadyItem, float]]] = {}
        for row in page:
            priorities.setdefault(row[0].sort_priority, []).append(row)
        return [row for rows in priorities.values() for row in rows[:per_priority]]

    async def waiting(self, project_id: int, *, after: tuple[int, UUID], limit: int) -> list[tuple[ReadyItem, float]]:
        """Returns one page of waiting items in order."""
        rows = [
            row
            for row in self.rows.values()
            if row.item.project_id == project_id
            and row.session_id is None
            and (row.item.sort_priority, row.item.rollout_id) > after
        ]
        rows.sort(key=lambda row: (row.item.sort_priority, row.item.rollout_id))
        return [(row.item, max(0.0, row.run_at - time.monotonic())) for row in rows[:limit]]

    def _leases(self) -> list[HeldLease]:
        return [
            HeldLease(
                rollout_id=row.item.rollout_id,
                session_id=session_id,
                epoch=epoch,
                project_id=row.item.project_id,
                charged=row.charged,
                policy=row.policy,
                cancel_requested=row.cancel_requested,
                hedged=row.hedge is not None,
            )
            for row in self.rows.values()
            if row.session_id is not None
            for session_id, epoch in ((row.session_id, row.epoch), *([row.hedge] if row.hedge else []))
        ]


if TYPE_CHECKING:
    # It keeps to the port.
    _: LeaseTable = MemoryLeaseTable()
