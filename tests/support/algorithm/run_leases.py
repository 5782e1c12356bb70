"""Leases of runs in memory, for services that share a model of the world; time is the machine's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fulmen.errors import RunLeaseHeld, RunLeaseLost, TrainingRunExists, TrainingRunNotFound
from fulmen_algorithm.runs.ports import LeaseRenewal, LeaseState, RunFence, RunLease, RunRecord
from tests.support.algorithm.crashes import Crashes


@dataclass(slots=True, kw_only=True)
class _Row:
    policy: str
    record: bytes
    request_id: str
    storage: str
    owner: str = ""
    address: str = ""
    epoch: int = 0
    until: float = 0.0
    released: bool = True
    claims_policy: bool = True
    state: LeaseState = LeaseState.WAITING


@dataclass(slots=True)
class LeaseTable:
    """The leases of a world."""

    rows: dict[str, _Row] = field(default_factory=dict)
    crashes: Crashes = field(default_factory=Crashes)
    """Counts the calls of services apart from those of the other ports."""

    def check(self, fence: RunFence | None) -> None:
        """Refuses an epoch that is not the newest, as the store does."""
        if fence is not None and self.rows[fence.training_run].epoch != fence.epoch:
            raise RunLeaseLost("lost", training_run=fence.training_run)

    def lapse(self, training_run: str) -> None:
        """Ends a lease as its time would."""
        self.rows[training_run].until = 0.0


@dataclass(slots=True)
class ModelRunLeases:
    """The port `RunLeases`, for one service."""

    table: LeaseTable
    owner: str
    storage: str = ""
    address: str = "127.0.0.1:1"
    ttl_s: float = 60.0

    async def create(self, runs: Sequence[RunRecord], *, request_id: str) -> None:
        taken = any(request_id and row.request_id == request_id for row in self.table.rows.values())
        if taken or any(each.training_run in self.table.rows for each in runs):
            raise TrainingRunExists("taken")
        for each, given in zip(runs, (request_id, *("" for _ in runs[1:])), strict=True):
            row = _Row(policy=each.policy, record=each.record, request_id=given, storage=self.storage)
            self.table.rows[each.training_run] = row

    async def acquire(self, training_run: str, *, after_epoch: int, for_change: bool = False) -> int:
        row = self.table.rows.get(training_run)
        if row is None:
            raise TrainingRunNotFound("unknown")
        if (self._held(row) and row.owner != self.owner) or row.storage != self.storage:
            raise RunLeaseHeld("held", training_run=training_run, owner_address=row.address)
        for name, other in self.table.rows.items():
            claimed = not other.released and other.claims_policy
            if name != training_run and not for_change and row.policy and other.policy == row.policy and claimed:
                raise RunLeaseHeld("held", training_run=name, owner_address=other.address)
        await self.table.crashes.before()
        row.owner, row.address, row.epoch = self.owner, self.address, max(row.epoch, after_epoch) + 1
        row.until, row.released, row.claims_policy = time.monotonic() + self.ttl_s, False, not for_change
        await self.table.crashes.after()
        return row.epoch

    async def renew(self, renewals: Sequence[LeaseRenewal]) -> set[str]:
        lost = set()
        for each in renewals:
            row = self.table.rows.get(each.fence.training_run)
            if row is None or row.epoch != each.fence.epoch or row.owner != self.owner or row.released:
                lost.add(each.fence.training_run)
                continue
            row.until, row.record = time.monotonic() + self.ttl_s, each.record or row.record
        return lost

    async def release(self, fence: RunFence, *, state: LeaseState, record: bytes) -> None:
        row = self.table.rows[fence.training_run]
        if row.epoch != fence.epoch:
            raise RunLeaseLost("lost", training_run=fence.training_run)
        await self.table.crashes.before()
        row.released, row.until, row.state, row.record = True, 0.0, state, record
        await self.table.crashes.after()

    async def changed(self) -> list[RunLease]:
        return [
            RunLease(
                training_run=name,
                owner=row.owner,
                owner_address=row.address,
                epoch=row.epoch,
                held_s=max(row.until - time.monotonic(), 0.0) if self._held(row) else 0.0,
                record=row.record,
                storage=row.storage,
            )
            for name, row in self.table.rows.items()
        ]

    @staticmethod
    def _held(row: _Row) -> bool:
        return not row.released and time.monotonic() < row.until
