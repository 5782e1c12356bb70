"""Background role: starts a second attempt beside one that takes longer than nearly all others of its task type.

Both run the same rollout under separate leases; the first success decides and the other attempt is superseded. A hedge
uses only idle credit. Source: Dean and Barroso, The Tail at Scale (CACM 56(2), 2013), hedged requests after the 95th
percentile of the expected latency.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.leases.leases import HedgeCandidate, LeaseTable
from fulmen_store.scheduling.dispatcher import Dispatcher
from fulmen_store.scheduling.durations import DurationTracker
from fulmen_store.scheduling.runner_streams import RunnerStream

__all__ = ["Hedger"]

POLL_INTERVAL_S: Final = 1.0
SHARE: Final = 0.95
MIN_SAMPLES: Final = 20
# Maximum number of candidates per pass; the rest follows a second later.
PAGE: Final = 1000


class Hedger:
    """Polls once a second for attempts to hedge, in projects whose hedging rule is on and while credit is idle."""

    def __init__(self, *, table: LeaseTable, dispatcher: Dispatcher, durations: DurationTracker) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._durations = durations

    async def run(self) -> None:
        """Hedges until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await self.hedge_once()
            except DatabaseUnavailable:
                continue

    async def hedge_once(self) -> int:
        """Starts due second attempts while credit is idle; returns their number."""
        projects = self._dispatcher.hedging_projects()
        if not projects:
            return 0
        candidates = await self._table.hedgeable(projects, PAGE)
        late = [(one, min_age_s) for one in candidates if one.age_s > (min_age_s := self._min_age_s(one)) > 0]
        streams = self._dispatcher.match_new(
            [one.item for one, _ in late], {one.item.rollout_id: one.session_id for one, _ in late}
        )
        return await self._claim(late, streams) if streams else 0

    def _min_age_s(self, candidate: HedgeCandidate) -> float:
        """Returns the minimum age at which an attempt is hedged, seconds; 0 if unknown."""
        task_type = candidate.item.task_type
        sketch = self._durations.sketch(task_type) if task_type is not None else None
        if sketch is None or sketch.total < MIN_SAMPLES:
            return 0.0
        return sketch.quantile_s(SHARE)

    async def _claim(self, late: Sequence[tuple[HedgeCandidate, float]], streams: dict[UUID, RunnerStream]) -> int:
        choices = [
            (one.item.rollout_id, streams[one.item.rollout_id].session_id, min_age_s)
            for one, min_age_s in late
            if one.item.rollout_id in streams
        ]
        try:
            grants = await self._table.claim_hedges(choices)
        except DatabaseUnavailable:
            self._dispatcher.mark_in_doubt(streams)
            raise
        self._dispatcher.deliver_new(streams, grants)
        return len(grants)
