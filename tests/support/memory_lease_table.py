"""A lease table in memory: a second implementation of the store's `LeaseTable`, for tests of its users."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from fulmen_store.domain.fair_queue import ReadyItem
from fulmen_store.domain.leases import AttemptEnd, EndedAttempt, EndedReport, Grant, HeldLease, Project, QuotaClaim
from fulmen_store.domain.rules import QueueTerms
from fulmen_store.domain.transitions import FINAL_STATES, RetryPolicy

__all__ = ["MemoryLeaseTable"]


@dataclass(slots=True)
class _Row:
    item: ReadyItem
    policy: RetryPolicy
    run_at: float = 0.0
    epoch: int = 0
    charged: int = 0
    session_id: UUID | None = None
    cancel_requested: bool = False


@dataclass(slots=True)
class MemoryLeaseTable:
    """Keeps live rollouts in a dictionary; sessions named in `over` have ended."""

    rows: dict[UUID, _Row] = field(default_factory=dict)
    ends: dict[tuple[UUID, int], EndedReport] = field(default_factory=dict)
    over: set[UUID] = field(default_factory=set)
    max_running: int | None = None

    def add(self, item: ReadyItem, policy: RetryPolicy) -> None:
        """Adds a waiting rollout."""
        self.rows[item.rollout_id] = _Row(item, policy)

    async def claim(self, choices: Sequence[tuple[UUID, UUID]]) -> list[Grant]:
        """Gives each (rollout, session) pair a lease if the rollout waits."""
        grants = []
        for rollout_id, session_id in choices:
            row = self.rows.get(rollout_id)
            if row is None or row.session_id is not None or row.run_at > time.monotonic():
                continue
            row.session_id, row.epoch = session_id, row.epoch + 1
            grants.append(
                Grant(
                    rollout_id=rollout_id,
                    session_id=session_id,
                    epoch=row.epoch,
                    project_id=row.item.project_id,
                    request=b"request",
                )
            )
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
            if row is None or (row.session_id, row.epoch, row.cancel_requested) != (
                report.session_id,
                report.epoch,
                end.cancel_requested,
            ):
                continue
            if end.rollout_state in FINAL_STATES:
                del self.rows[report.rollout_id]
            else:
                row.session_id, row.cancel_requested = None, False
                row.charged += end.charge
                row.run_at = time.monotonic() + end.delay_s
            self.ends[report.rollout_id, report.epoch] = EndedReport(
                rollout_id=report.rollout_id,
                epoch=report.epoch,
                session_id=report.session_id,
                kind=report.kind,
                report=report.report,
            )
            written.append(
                EndedAttempt(
                    item=row.item,
                    session_id=report.session_id,
                    epoch=report.epoch,
                    kind=report.kind,
                    rollout_state=end.rollout_state,
                )
            )
        return written

    async def ended(self, keys: Sequence[tuple[UUID, int]]) -> list[EndedReport]:
        """Returns the stored ends of attempts."""
        return [self.ends[key] for key in keys if key in self.ends]

    async def projects(self) -> list[Project]:
        """Returns all projects."""
        return [Project(project_id=1, name="projects/default", terms=QueueTerms(max_running=self.max_running))]

    async def waiting(self, project_id: int, *, after: tuple[int, UUID], limit: int) -> list[tuple[ReadyItem, float]]:
        """Returns one page of waiting items in order."""
        rows = [
            row
            for row in self.rows.values()
            if row.item.project_id == project_id
            and row.session_id is None
            and (row.item.rank, row.item.rollout_id) > after
        ]
        rows.sort(key=lambda row: (row.item.rank, row.item.rollout_id))
        return [(row.item, max(0.0, row.run_at - time.monotonic())) for row in rows[:limit]]

    def _leases(self) -> list[HeldLease]:
        return [
            HeldLease(
                rollout_id=row.item.rollout_id,
                session_id=row.session_id,
                epoch=row.epoch,
                project_id=row.item.project_id,
                charged=row.charged,
                policy=row.policy,
                cancel_requested=row.cancel_requested,
            )
            for row in self.rows.values()
            if row.session_id is not None
        ]
