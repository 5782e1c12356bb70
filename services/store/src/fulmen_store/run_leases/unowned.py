"""Background role: bounds the work of runs that nothing runs.

Invariant: of a run whose lease ended longer ago than the limit, nothing waits in the queue. Rollouts that are running end
by themselves.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from fulmen.errors import DatabaseUnavailable, RunLeaseLost
from fulmen_store.metrics import StoreMetrics
from fulmen_store.rollouts.rollouts import Rollouts
from fulmen_store.run_leases.run_leases import MAX_TTL_S
from fulmen_store.run_leases.table import RunLeaseTable

__all__ = ["UnownedRuns"]

INTERVAL_S: Final = 10.0
RUNS_PER_PASS: Final = 100
SHOWN_AFTER_S: Final = 60.0

_log = structlog.get_logger()


class UnownedRuns:
    """Cancels the rollouts of runs without an owner."""

    def __init__(
        self, table: RunLeaseTable, rollouts: Rollouts, limit_s: float, metrics: StoreMetrics | None = None
    ) -> None:
        """Creates the role; `limit_s` is the time without an owner, seconds."""
        self._table = table
        self._rollouts = rollouts
        self._limit_s = limit_s
        self._metrics = metrics
        self.count = 0
        if metrics is not None:
            metrics.watch_unowned(lambda: self.count)

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            try:
                await self.run_once()
            except DatabaseUnavailable as error:
                _log.warning("unowned_runs_postponed", reason=error.reason)
            await asyncio.sleep(INTERVAL_S)

    async def run_once(self) -> None:
        """Makes one pass.

        Raises:
            DatabaseUnavailable: If the database is unavailable.
        """
        # A clock that was set ahead ends all leases; owners get the longest TTL to renew them.
        if not await self._table.clock_has_run_for(MAX_TTL_S):
            return
        self.count = await self._table.count_unowned(for_s=SHOWN_AFTER_S)
        for project_id, fence in await self._table.unowned(for_s=self._limit_s, limit=RUNS_PER_PASS):
            try:
                outcome = await self._rollouts.cancel_run(project_id, fence.training_run, fence=fence)
            except RunLeaseLost:
                continue  # it has an owner again
            await self._table.mark_swept(project_id, fence)
            if outcome.cancelled or outcome.cancelling:
                _log.warning("unowned_run_cancelled", run=fence.training_run, cancelled=outcome.cancelled)
                if self._metrics is not None:
                    self._metrics.unowned_cancelled(outcome.cancelled + outcome.cancelling)
