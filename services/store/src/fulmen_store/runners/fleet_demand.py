"""Fleet demand: counts of live rollouts, cached.

Counts are kept, and their cost grows with the kinds of rollouts. Every replica reads them for its metrics every 15 s, and
spends at most a twentieth of its time on it.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fulmen.errors import DatabaseUnavailable
from fulmen_store.clock import Clock
from fulmen_store.runners.demand import (
    Demand,
    DemandQuery,
    LabelDemand,
    QueueCensus,
    WaitingWork,
    by_labels,
    demand_of,
    with_forecast,
)
from fulmen_store.runners.forecast import Compared, DemandForecast
from fulmen_store.scheduling.table import DemandTable, DurationTable

__all__ = [
    "FleetDemand",
]

FRESH_S: Final = 1.0
TTL_PER_COST: Final = 20.0
COUNT_INTERVAL_S: Final = 15.0
# Of the most recent queries; others start again.
MAX_FORECASTS: Final = 64
# Durations are read for the task types with the most waiting rollouts; the others use their project's mean.
TYPES_LOOKED_UP: Final = 1000


class FleetDemand:
    """Background role: counts periodically for the metrics, and on request; adds up the kept counts before."""

    def __init__(self, *, table: DemandTable, durations: DurationTable, clock: Clock | None = None) -> None:
        self._table = table
        self._durations = durations
        self._clock = (clock or Clock()).monotonic_s
        self._lock = asyncio.Lock()
        self._census: QueueCensus | None = None
        self._stale_at = -math.inf
        self._forecasts: OrderedDict[DemandQuery, DemandForecast] = OrderedDict()
        self._compared = Compared()

    async def run(self) -> None:
        """Counts until cancelled."""
        while True:
            try:
                await self._table.fold()
                self.sample(await self.census())
            except DatabaseUnavailable:
                self._census = None
                # Samples are at equal intervals.
                self._forecasts.clear()
            await asyncio.sleep(COUNT_INTERVAL_S)

    def shown(self) -> list[LabelDemand]:
        """Returns the latest counts for the metrics; empty if counting failed."""
        return [] if self._census is None else by_labels(self._census)

    async def census(self) -> QueueCensus:
        """Counts, or returns a recent count.

        Raises:
            DatabaseUnavailable: If the rollouts cannot be counted.
        """
        async with self._lock:
            began = self._clock()
            if self._census is None or began >= self._stale_at:
                self._census = await self._count(began)
                now = self._clock()
                self._stale_at = now + max(FRESH_S, TTL_PER_COST * (now - began))
            return self._census

    async def demand(self, query: DemandQuery) -> tuple[Demand, float]:
        """Returns the demand and the age of its counts, seconds.

        Raises:
            DatabaseUnavailable: If the rollouts cannot be counted.
        """
        census = await self.census()
        demand = demand_of(census, query)
        if query.forecast_s:
            demand = with_forecast(demand, query, self._forecast(query))
        return demand, max(0.0, self._clock() - census.counted_at)

    def sample(self, census: QueueCensus) -> None:
        """Adds a count to the series of what is forecast."""
        for query, forecast in self._forecasts.items():
            compared = forecast.add(demand_of(census, query).slots)
            if compared is not None:
                pairs = zip(self._compared, compared, strict=True)
                self._compared = Compared(*(total + more for total, more in pairs))

    def forecast_totals(self) -> Compared:
        """Returns the sums over all samples that were compared with their forecasts."""
        return self._compared

    def _forecast(self, query: DemandQuery) -> DemandForecast:
        """Returns the series of a query, which starts with the first request."""
        key = replace(query, min_runners=0, max_runners=DemandQuery().max_runners)
        found = self._forecasts.setdefault(key, DemandForecast(horizon_s=query.forecast_s, interval_s=COUNT_INTERVAL_S))
        self._forecasts.move_to_end(key)
        while len(self._forecasts) > MAX_FORECASTS:
            self._forecasts.popitem(last=False)
        return found

    async def _count(self, now: float) -> QueueCensus:
        work = await self._table.work()
        sketches = await self._durations.read(_frequent_types(work)) if work else {}
        known = {task_type: sketch for task_type, sketch in sketches.items() if sketch.total}
        return QueueCensus(
            work=work,
            mean_s={task_type: sketch.mean_s() for task_type, sketch in known.items()},
            samples={task_type: sketch.total for task_type, sketch in known.items()},
            counted_at=now,
        )


def _frequent_types(work: Iterable[WaitingWork]) -> list[int]:
    waiting: defaultdict[int, int] = defaultdict(int)
    for each in work:
        if each.task_type is not None:
            waiting[each.task_type] += each.queued
    return sorted(waiting, key=lambda task_type: (-waiting[task_type], task_type))[:TYPES_LOOKED_UP]
