"""Durations of successful attempts by task type, shared by all replicas.

Durations are counted in buckets whose bounds grow by a constant factor: quantiles have a relative error of at most 2 %,
counts of several replicas add up, and no sampling is needed. Source: DDSketch (Masson, Rim and Lee, PVLDB 12(12),
2019), section 2, without collapsing: a day has 457 buckets.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from fulmen.errors import DatabaseUnavailable
from fulmen_store.clock import Clock
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.scheduling.duration_sketch import DurationSketch, bucket_of
from fulmen_store.scheduling.table import DurationTable

__all__ = [
    "DurationTracker",
]

MEDIAN: Final = 0.5
MIN_SAMPLES: Final = 20
DEFAULT_FACTOR: Final = 3.0
# Attempts of milliseconds take longer when their machine is busy.
MIN_BOUND_S: Final = 1.0

WRITE_INTERVAL_S: Final = 1.0
READ_INTERVAL_S: Final = 10.0
TYPES_REMEMBERED: Final = 1000


class DurationTracker:
    """Background role: collects durations of ended attempts and predicts them by task type.

    Predictions are a few seconds old; an unknown type is read after the first request for it.
    """

    def __init__(self, table: DurationTable, *, clock: Clock | None = None) -> None:
        self._table = table
        self._clock = (clock or Clock()).monotonic_s
        self._unwritten: Counter[tuple[int, int]] = Counter()
        self._known: OrderedDict[int, DurationSketch] = OrderedDict()
        self._medians: dict[int, float] = {}
        self._unread: set[int] = set()
        self._read_at = 0.0

    def learn(self, ended: Iterable[EndedAttempt]) -> None:
        """Counts the successful attempts."""
        for one in ended:
            if one.kind is FailureKind.NONE and one.item.task_type is not None:
                self._unwritten[one.item.task_type, bucket_of(one.duration_s)] += 1

    def sketch(self, task_type: int) -> DurationSketch | None:
        """Returns the sketch of a task type; None if it is unknown here."""
        known = self._known.get(task_type)
        if known is None and len(self._unread) < TYPES_REMEMBERED:
            self._unread.add(task_type)
        return known

    def bound_s(self, task_type: int, quantile: float, factor: float) -> float | None:
        """Returns `factor` times a quantile of a task type, seconds; None while too few attempts are known.

        Args:
            task_type: Number of the task type.
            quantile: Share of the attempts that took at most this long, between 0 and 1.
            factor: At least 1; 0 for `DEFAULT_FACTOR`.
        """
        sketch = self.sketch(task_type)
        # Rounded: (1 - 0.95) * 20 is a little less than 1.
        if sketch is None or sketch.total < MIN_SAMPLES or round((1 - quantile) * sketch.total, 9) < 1:
            return None
        return max(MIN_BOUND_S, (factor or DEFAULT_FACTOR) * sketch.quantile_s(quantile))

    def predicted_s(self, task_type: int | None) -> float:
        """Returns the median duration of a task type, seconds; 0 if unknown."""
        if task_type is None:
            return 0.0
        median = self._medians.get(task_type)
        if median is None:
            self.sketch(task_type)
            return 0.0
        return median

    async def run(self) -> None:
        """Exchanges durations with the table until cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            try:
                await self.run_once()
            except DatabaseUnavailable:
                continue

    async def run_once(self) -> None:
        """Writes new durations; reads requested task types and, periodically, all in use."""
        if self._unwritten:
            counts, self._unwritten = self._unwritten, Counter()
            try:
                await self._table.add(counts)
            except DatabaseUnavailable:
                self._unwritten.update(counts)
                raise
            self._unread.update(task_type for task_type, _ in counts)
        if self._clock() >= self._read_at:
            self._read_at = self._clock() + READ_INTERVAL_S
            self._unread.update(self._known)
        if self._unread:
            await self._read()

    async def _read(self) -> None:
        wanted = sorted(self._unread)[-TYPES_REMEMBERED:]
        found = await self._table.read(wanted)
        self._unread.clear()
        for task_type in wanted:
            sketch = found.get(task_type, DurationSketch())
            self._known[task_type] = sketch
            self._known.move_to_end(task_type)
            self._medians[task_type] = sketch.quantile_s(MEDIAN)
        while len(self._known) > TYPES_REMEMBERED:
            forgotten, _ = self._known.popitem(last=False)
            del self._medians[forgotten]
