"""Background role: ends overdue attempts and rollouts without a report.

Three cases, all by the database's clock: an attempt past its timeout with a live runner, a cancelled attempt that its
runner does not stop, and a waiting or running rollout past its deadline.

Invariant: every end is the compare-and-set of `AttemptEnds` or of one row, so any number of replicas may run this role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from fulmen.errors import DatabaseUnavailable
from fulmen_store.events import QueueEvents
from fulmen_store.leases.attempt_ends import AttemptEnds
from fulmen_store.leases.codec import explained
from fulmen_store.leases.leases import AttemptReport, CompletionStatus
from fulmen_store.leases.table import OverdueAttempt, OverdueReason, OverdueTable
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.scheduling.runner_streams import LeasesLost

__all__ = [
    "OverdueReaper",
]

PAGE: Final = 1000
POLL_INTERVAL_S: Final = 1.0
POLLS_PER_TTL: Final = 3


_ENDS: Final = {
    OverdueReason.CANCEL_GRACE: (
        FailureKind.CANCELLED,
        "The rollout was cancelled and the runner did not report the attempt's end in time; the store ended it.",
    ),
    OverdueReason.DEADLINE: (
        FailureKind.TIMEOUT,
        "The rollout's deadline passed while the attempt ran; the store ended it.",
    ),
    OverdueReason.TIMEOUT: (
        FailureKind.TIMEOUT,
        "The attempt ran past its timeout and the runner did not report its end in time; the store ended it.",
    ),
}


class OverdueReaper:
    """Ends overdue attempts and rollouts."""

    def __init__(
        self,
        *,
        table: OverdueTable,
        ends: AttemptEnds,
        events: QueueEvents,
        attempt_grace_s: float,
        lease_ttl_s: float,
    ) -> None:
        """Creates the role.

        Args:
            table: Table of leases and waiting rollouts.
            ends: Use case that ends attempts.
            events: Receiver of finished projects and notices for the runners of ended attempts.
            attempt_grace_s: Grace period for reports after an attempt's timeout, seconds.
            lease_ttl_s: Lifetime of a runner session without activity, seconds.
        """
        self._table = table
        self._ends = ends
        self._events = events
        self._attempt_grace_s = attempt_grace_s
        self._lease_ttl_s = lease_ttl_s

    async def run(self) -> None:
        """Ends overdue attempts and rollouts until cancelled."""
        loop = asyncio.get_running_loop()
        # After a start or a database outage, runners get one TTL to send undelivered reports.
        attempts_from = loop.time() + self._lease_ttl_s
        while True:
            await asyncio.sleep(min(POLL_INTERVAL_S, self._lease_ttl_s / POLLS_PER_TTL))
            try:
                if not await self._table.clock_has_run_for(self._lease_ttl_s):
                    continue
                await self.fail_waiting()
                if loop.time() >= attempts_from:
                    await self.end_attempts()
            except DatabaseUnavailable:
                attempts_from = loop.time() + self._lease_ttl_s

    async def fail_waiting(self) -> int:
        """Fails waiting rollouts past their deadline; returns their number."""
        count = 0
        while True:
            projects = await self._table.fail_waiting(PAGE)
            if projects:
                self._events.projects_finished.emit(frozenset(projects))
            count += len(projects)
            if len(projects) < PAGE:
                return count

    async def end_attempts(self) -> int:
        """Ends overdue attempts and notifies their runners; returns their number."""
        count = 0
        while True:
            found = await self._table.overdue(attempt_grace_s=self._attempt_grace_s, limit=PAGE)
            ended = await self._end(found) if found else 0
            count += ended
            # Rows that were not ended have changed since they were read; the next pass handles them.
            if len(found) < PAGE or not ended:
                return count

    async def _end(self, found: Sequence[OverdueAttempt]) -> int:
        statuses = await self._ends.report([self._report(attempt) for attempt in found])
        ended = [attempt for attempt, status in zip(found, statuses, strict=True) if status is CompletionStatus.APPLIED]
        self._events.session_notices.emit(
            [(attempt.session_id, LeasesLost(attempts=[attempt.attempt])) for attempt in ended]
        )
        return len(ended)

    def _report(self, attempt: OverdueAttempt) -> AttemptReport:
        kind, text = _ENDS[attempt.reason]
        return AttemptReport(
            project_id=attempt.attempt.project_id,
            rollout_id=attempt.attempt.rollout_id,
            session_id=attempt.session_id,
            epoch=attempt.attempt.epoch,
            kind=kind,
            report=explained(text),
        )
