"""Background role: creates the rollouts of schedules that are due.

Invariant: a due time creates its rollouts exactly once. One replica records the run, with the ids of its rollouts, in the
commit that moves the schedule on; any replica that creates them, also after that replica has died, uses these ids.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from fulmen.errors import DatabaseUnavailable, FulmenError, ProjectNotFound
from fulmen.store.v1 import schedule_service_pb2 as pb
from fulmen_store.database.stored import UNREADABLE, read_column
from fulmen_store.metrics import StoreMetrics
from fulmen_store.rollouts.rollouts import Rollouts
from fulmen_store.schedules.codec import rollouts_of
from fulmen_store.schedules.records import ClaimedRun, RunState
from fulmen_store.schedules.table import ScheduleTable

__all__ = ["DueSchedules"]

INTERVAL_S: Final = 1.0
SCHEDULES_PER_PASS: Final = 100
MAX_MESSAGE: Final = 1024

_log = structlog.get_logger()


class DueSchedules:
    """Runs schedules that are due, and continues what replicas that died have left."""

    def __init__(self, *, table: ScheduleTable, rollouts: Rollouts, metrics: StoreMetrics | None = None) -> None:
        self._table = table
        self._rollouts = rollouts
        self._metrics = metrics

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            try:
                await self.run_once()
            except DatabaseUnavailable as error:
                _log.warning("schedules_postponed", reason=error.reason)
            await asyncio.sleep(INTERVAL_S)

    async def run_once(self) -> None:
        """Makes one pass.

        Raises:
            DatabaseUnavailable: If the database is unavailable; what is not finished is continued later.
        """
        for schedule in await self._table.due(SCHEDULES_PER_PASS):
            run = await self._table.claim(schedule)
            if run is not None and run.state is RunState.STARTING:
                await self.create(run)
            elif run is not None:
                self._report(run.state)
        for run in await self._table.unfinished(SCHEDULES_PER_PASS):
            await self.create(run)

    async def create(self, run: ClaimedRun) -> None:
        """Creates the rollouts of a run that this replica has claimed, and records how that ended.

        Raises:
            DatabaseUnavailable: If the outcome is unknown.
        """
        reason = message = ""
        try:
            is_readable = await self._create(run)
        except DatabaseUnavailable:
            raise
        except FulmenError as error:
            reason, message = error.reason, str(error)
        else:
            message = "" if is_readable else UNREADABLE
        state = RunState.FAILED if message else RunState.CREATED
        delay_s = await self._table.end(run, state, reason=reason, message=message[:MAX_MESSAGE])
        if delay_s is None:
            return
        self._report(state, delay_s)
        if state is RunState.FAILED:
            _log.warning("schedule_run_failed", schedule_id=run.schedule_id, due=run.due_at.isoformat(), reason=reason)

    async def _create(self, run: ClaimedRun) -> bool:
        """Returns False if what is stored of the schedule is unreadable."""
        found = await self._table.spec(run.schedule_id)
        if found is None:
            raise ProjectNotFound("The schedule or its project was deleted.")
        project, name, spec = found
        message = read_column(pb.Schedule, spec)
        if message is None or len(message.rollouts) != len(run.rollout_ids):
            return False
        await self._rollouts.create_with_ids(rollouts_of(message, project, name, run.due_at), run.rollout_ids)
        return True

    def _report(self, state: RunState, delay_s: float | None = None) -> None:
        if self._metrics is not None:
            self._metrics.schedule_run(state.name.lower(), delay_s)
