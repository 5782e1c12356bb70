"""Ends of attempts: runners' reports, released leases and lost leases. One entry point, one statement, one commit.

Invariant: an attempt ends exactly once, by the session that holds its lease when the row changes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.events import QueueEvents
from fulmen_store.leases.codec import explained
from fulmen_store.leases.leases import (
    AttemptEnd,
    AttemptReport,
    CompletionStatus,
    EndedAttempt,
    HeldLease,
    LeasedAttempt,
    LeaseTable,
)
from fulmen_store.metrics import StoreMetrics
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind, RolloutState, decide
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.runner_streams import LeasesLost

__all__ = [
    "AttemptEnds",
    "LeaseReturner",
]

MAX_ROUNDS: Final = 5
RUNNER_DIED: Final = "The runner died while this was its only attempt. The rollout is not retried."

AttemptKey = tuple[int, int, int, int]
"""Rollout, session, epoch and project; the ids as integers, whose hashes cost a tenth of theirs."""


class AttemptEnds:
    """Decides and writes the ends of attempts, in group commits."""

    def __init__(
        self,
        *,
        table: LeaseTable,
        events: QueueEvents,
        metrics: StoreMetrics | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Creates the use case.

        Args:
            table: Table of leases.
            events: Receiver of ended attempts, finished projects, requeued work and notices for superseded attempts.
            metrics: Instruments; by default none.
            rng: Random source of back-off jitter; by default seeded by the operating system.
        """
        self._table = table
        self._events = events
        self._rng = rng or random.Random()
        self.committer: GroupCommitter[AttemptReport, CompletionStatus] = GroupCommitter(
            "end_attempts", self._execute, metrics=metrics
        )

    async def report(self, reports: Sequence[AttemptReport]) -> list[CompletionStatus]:
        """Ends attempts as reported by their lease holders; returns, after the commit, one status per report.

        Raises:
            DatabaseUnavailable: If the outcome is unknown; the same reports may be sent again.
        """
        return await self.committer.submit(reports, size_bytes=sum(len(report.report) + 64 for report in reports))

    async def end_leases(self, leases: Sequence[HeldLease], kind: FailureKind) -> int:
        """Ends the attempts of leases for one reason, such as LEASE_LOST; returns the number that this call ended."""
        statuses = await self.report(
            [
                AttemptReport(
                    project_id=lease.project_id,
                    rollout_id=lease.rollout_id,
                    session_id=lease.session_id,
                    epoch=lease.epoch,
                    kind=kind,
                )
                for lease in leases
            ]
        )
        return sum(status is CompletionStatus.APPLIED for status in statuses)

    async def _execute(self, reports: Sequence[AttemptReport]) -> list[CompletionStatus]:
        pending: dict[AttemptKey, AttemptReport] = {}
        repeated: list[int] = []
        keys = [_key(report) for report in reports]
        for index, (key, report) in enumerate(zip(keys, reports, strict=True)):
            if key in pending:
                repeated.append(index)
            else:
                pending[key] = report
        statuses = await self._end_each(pending)
        answers = [statuses[key] for key in keys]
        if repeated:
            # If a batch has several reports of one attempt, the first counts; the others are executed after it.
            later = await self._execute([reports[index] for index in repeated])
            for index, status in zip(repeated, later, strict=True):
                answers[index] = status
        return answers

    async def _end_each(self, pending: dict[AttemptKey, AttemptReport]) -> dict[AttemptKey, CompletionStatus]:
        statuses: dict[AttemptKey, CompletionStatus] = {}
        # A success needs no policy: it is written immediately, and its lease is read only if the write did not apply.
        held = await self._held(report for report in pending.values() if report.kind is not FailureKind.NONE)
        for _ in range(MAX_ROUNDS):
            await self._write(pending, held, statuses)
            if not pending:
                break
            held = await self._held(pending.values())
            await self._settle_stale(pending, held, statuses)
            if not pending:
                break
        for key in pending:
            raise DatabaseUnavailable(
                "The lease changed repeatedly while its attempt ended.", rollout_id=str(UUID(int=key[0])), number=key[2]
            )
        return statuses

    async def _held(self, reports: Iterable[AttemptReport]) -> dict[AttemptKey, HeldLease]:
        ids = list({report.rollout_id for report in reports})
        leases = await self._table.held(ids) if ids else []
        return {(lease.rollout_id.int, lease.session_id.int, lease.epoch, lease.project_id): lease for lease in leases}

    async def _write(
        self,
        pending: dict[AttemptKey, AttemptReport],
        held: dict[AttemptKey, HeldLease],
        statuses: dict[AttemptKey, CompletionStatus],
    ) -> None:
        ends = {key: end for key, report in pending.items() if (end := self._decided(report, held)) is not None}
        if not ends:
            return
        requeued: list[tuple[ReadyItem, float]] = []
        finished: set[int] = set()
        written = await self._write_ends(ends, held)
        for ended in written:
            key = (ended.item.rollout_id.int, ended.session_id.int, ended.epoch, ended.item.project_id)
            statuses[key] = CompletionStatus.APPLIED
            del pending[key]
            if ended.rollout_state in FINAL_STATES:
                finished.add(ended.item.project_id)
            elif ended.rollout_state is RolloutState.RETRY_WAIT:
                requeued.append((ended.item, ends[key].delay_s))
        self._events.attempts_ended.emit(written)
        superseded = [
            (session_id, LeasesLost(attempts=[LeasedAttempt(ended.item.project_id, ended.item.rollout_id, epoch)]))
            for ended in written
            if ended.superseded is not None
            for session_id, epoch in [ended.superseded]
        ]
        if superseded:
            self._events.session_notices.emit(superseded)
        if requeued:
            self._events.work_ready.emit(requeued)
        if finished:
            self._events.projects_finished.emit(frozenset(finished))

    async def _write_ends(
        self, ends: dict[AttemptKey, AttemptEnd], held: dict[AttemptKey, HeldLease]
    ) -> list[EndedAttempt]:
        """Writes ends; at most one attempt of a rollout per statement, successes before failures."""
        hedged: dict[int, AttemptEnd] = {}
        for key, end in ends.items():
            lease = held.get(key)
            if lease is not None and lease.hedged and (key[0] not in hedged or end.report.kind is FailureKind.NONE):
                hedged[key[0]] = end
        plain = [end for key, end in ends.items() if key[0] not in hedged]
        written = await self._table.end(plain) if plain else []
        if hedged:
            written += await self._table.end_hedged(list(hedged.values()))
        return written

    def _decided(self, report: AttemptReport, held: dict[AttemptKey, HeldLease]) -> AttemptEnd | None:
        lease = held.get(_key(report))
        if lease is None:
            if report.kind is not FailureKind.NONE:
                return None
            return AttemptEnd(
                report=report, cancel_requested=False, rollout_state=RolloutState.SUCCEEDED, delay_s=0.0, charge=1
            )
        died = report.kind is FailureKind.LEASE_LOST and lease.lost_beside is not None
        decision = decide(
            report.kind,
            policy=lease.policy,
            charged=lease.charged,
            cancel_requested=lease.cancel_requested,
            hedged=lease.hedged,
            jitter=self._rng.uniform(-1, 1),
            time_left_s=lease.time_left_s,
            lost_runners=lease.lost_runners + died,
            was_alone=died and lease.lost_beside == 1,
        )
        if decision.kind is not None:
            report = replace(report, kind=decision.kind, report=explained(RUNNER_DIED), failure=RUNNER_DIED)
        return AttemptEnd(
            report=report,
            cancel_requested=lease.cancel_requested,
            rollout_state=decision.rollout_state,
            delay_s=decision.delay_s,
            charge=decision.charge,
            lost_runners=int(died),
        )

    async def _settle_stale(
        self,
        pending: dict[AttemptKey, AttemptReport],
        held: dict[AttemptKey, HeldLease],
        statuses: dict[AttemptKey, CompletionStatus],
    ) -> None:
        stale = [key for key in pending if key not in held]
        if not stale:
            return
        stored = {
            (end.rollout_id.int, end.session_id.int, end.epoch, end.project_id): end
            for end in await self._table.ended([(pending[key].rollout_id, pending[key].epoch) for key in stale])
        }
        for key in stale:
            report, end = pending.pop(key), stored.get(key)
            same = end is not None and (end.kind, end.report) == (report.kind, report.report)
            statuses[key] = CompletionStatus.DUPLICATE if same else CompletionStatus.LEASE_LOST


def _key(report: AttemptReport) -> AttemptKey:
    return report.rollout_id.int, report.session_id.int, report.epoch, report.project_id


RETRY_PAUSE_S: Final = 0.5


class LeaseReturner:
    """Background role: releases undelivered leases and retries until the release is durable.

    A release does not count as an attempt of the rollout.
    """

    def __init__(self, ends: AttemptEnds) -> None:
        self._ends = ends
        self._waiting: asyncio.Queue[Sequence[AttemptReport]] = asyncio.Queue()

    def release(self, reports: Sequence[AttemptReport]) -> None:
        """Queues leases to be released."""
        self._waiting.put_nowait(reports)

    async def run(self) -> None:
        """Releases until cancelled."""
        while True:
            reports = await self._waiting.get()
            try:
                await self._ends.report(reports)
            except DatabaseUnavailable:
                self.release(reports)
                await asyncio.sleep(RETRY_PAUSE_S)
