"""Background role: ends what is over although nobody says so.

Three clocks, all of them the database's: an attempt that runs past its timeout although its runner is alive, a
cancelled attempt whose runner does not stop it, and a rollout that has not ended by its deadline, waiting or running.

Invariant: every end is the compare-and-set of `AttemptEnds` or of one row, so any number of replicas may look at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.leases.attempt_ends import AttemptEnds
from fulmen_store.leases.leases import AttemptReport, CompletionStatus
from fulmen_store.leases.table import OverdueAttempt, OverdueReason, OverdueTable
from fulmen_store.periodic import Pace
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.scheduling.runner_streams import LeasesLost, Notice

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
        tell: Callable[[Sequence[tuple[UUID, Notice]]], None],
        finished: Callable[[frozenset[int]], None],
        explain: Callable[[str], bytes],
        attempt_grace_s: float,
        lease_ttl_s: float,
    ) -> None:
        """Wires the role.

        Args:
            table: where leases and waiting rollouts live.
            ends: ends the attempts.
            tell: passes notices on to runner sessions.
            finished: told the projects in which rollouts became final.
            explain: makes the stored report of an attempt from what failed.
            attempt_grace_s: how long after its timeout an attempt may still be reported, seconds.
            lease_ttl_s: how long a runner session lives without a sign of life, seconds.
        """
        self._table = table
        self._ends = ends
        self._tell = tell
        self._finished = finished
        self._explain = explain
        self._attempt_grace_s = attempt_grace_s
        self._lease_ttl_s = lease_ttl_s

    async def run(self) -> None:
        """Looks until it is cancelled."""
        pace = Pace(min(POLL_INTERVAL_S, self._lease_ttl_s / POLLS_PER_TTL))
        loop = asyncio.get_running_loop()
        # After a start, and after the database was away, runners get one TTL to send what they could not report.
        attempts_from = loop.time() + self._lease_ttl_s
        while True:
            await pace.next()
            try:
                await self.fail_waiting()
                if loop.time() >= attempts_from:
                    await self.end_attempts()
            except DatabaseUnavailable:
                attempts_from = loop.time() + self._lease_ttl_s

    async def fail_waiting(self) -> int:
        """Fails waiting rollouts whose deadline has passed; returns how many."""
        count = 0
        while True:
            projects = await self._table.fail_waiting(PAGE)
            if projects:
                self._finished(frozenset(projects))
            count += len(projects)
            if len(projects) < PAGE:
                return count

    async def end_attempts(self) -> int:
        """Ends overdue attempts and tells their runners; returns how many."""
        count = 0
        while True:
            found = await self._table.overdue(attempt_grace_s=self._attempt_grace_s, limit=PAGE)
            ended = await self._end(found) if found else 0
            count += ended
            # What was not ended just now changed under the look: its turn comes at the next one.
            if len(found) < PAGE or not ended:
                return count

    async def _end(self, found: Sequence[OverdueAttempt]) -> int:
        statuses = await self._ends.report([self._report(attempt) for attempt in found])
        ended = [attempt for attempt, status in zip(found, statuses, strict=True) if status is CompletionStatus.APPLIED]
        self._tell(
            [(attempt.session_id, LeasesLost(attempts=[(attempt.rollout_id, attempt.epoch)])) for attempt in ended]
        )
        return len(ended)

    def _report(self, attempt: OverdueAttempt) -> AttemptReport:
        kind, text = _ENDS[attempt.reason]
        return AttemptReport(
            rollout_id=attempt.rollout_id,
            session_id=attempt.session_id,
            epoch=attempt.epoch,
            kind=kind,
            report=self._explain(text),
        )
