"""How long attempts take, by task type: learned from those that succeeded, shared by all replicas.

A type's durations are counted in buckets whose bounds grow by a constant factor, so that a quantile is off by at most
2 % of itself, counts of several replicas simply add up, and nothing is ever lost to sampling. Source: DDSketch (Masson,
Rim and Lee, PVLDB 12(12), 2019), section 2, without collapsing: a day has 457 buckets.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from fulmen.errors import DatabaseUnavailable
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.periodic import Pace
from fulmen_store.rollouts.transitions import FailureKind

__all__ = ["DurationSketch", "DurationTable", "Durations", "bucket_of"]

RELATIVE_ERROR: Final = 0.02
GAMMA: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
SMALLEST_S: Final = 0.001
LARGEST_BUCKET: Final = 600
MEDIAN: Final = 0.5

WRITE_INTERVAL_S: Final = 1.0
READ_INTERVAL_S: Final = 10.0
TYPES_REMEMBERED: Final = 1000


def bucket_of(duration_s: float) -> int:
    """Returns the bucket of a duration: bucket i holds (1 ms * gamma^(i-1), 1 ms * gamma^i]."""
    if duration_s <= SMALLEST_S:
        return 0
    return min(LARGEST_BUCKET, math.ceil(math.log(duration_s / SMALLEST_S) / math.log(GAMMA)))


@dataclass(slots=True)
class DurationSketch:
    """The counts of one task type's durations by bucket."""

    counts: Counter[int] = field(default_factory=Counter)
    total: int = 0

    def add(self, bucket: int, count: int = 1) -> None:
        """Counts durations."""
        self.counts[bucket] += count
        self.total += count

    def quantile_s(self, share: float) -> float:
        """Returns the duration that this share of attempts did not exceed, seconds; 0 if none was measured.

        It is within 2 % of the sample of rank `floor(share * (n - 1))`, for durations from 1 ms to a day and more.
        """
        rank = math.floor(share * (self.total - 1))
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen > rank:
                return _middle_s(bucket)
        return 0.0

    def mean_s(self) -> float:
        """Returns the mean duration, seconds, within 2 %; 0 if none was measured."""
        if not self.total:
            return 0.0
        return sum(count * _middle_s(bucket) for bucket, count in self.counts.items()) / self.total


def _middle_s(bucket: int) -> float:
    """Returns the point of a bucket that is as far, in proportion, from both of its bounds."""
    return SMALLEST_S * 2 * GAMMA**bucket / (GAMMA + 1)


class DurationTable(Protocol):
    """Where counts of durations live."""

    async def add(self, counts: Mapping[tuple[int, int], int]) -> None:
        """Adds counts by (task type, bucket), in one commit."""
        ...

    async def read(self, task_types: Sequence[int]) -> Mapping[int, DurationSketch]:
        """Returns what is known of task types."""
        ...


class Durations:
    """Background role: learns durations at the ends of attempts, and knows what to expect of a task type.

    What it knows of a type is at most some seconds old, and nothing at first: the first question makes it look.
    """

    def __init__(self, table: DurationTable, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the table, and monotonic seconds."""
        self._table = table
        self._clock = clock
        self._unwritten: Counter[tuple[int, int]] = Counter()
        self._known: OrderedDict[int, DurationSketch] = OrderedDict()
        self._medians: dict[int, float] = {}
        self._unread: set[int] = set()
        self._read_at = 0.0

    def learn(self, ended: Iterable[EndedAttempt]) -> None:
        """Counts those attempts that succeeded."""
        for one in ended:
            if one.kind is FailureKind.NONE and one.item.task_type is not None:
                self._unwritten[one.item.task_type, bucket_of(one.duration_s)] += 1

    def sketch(self, task_type: int) -> DurationSketch | None:
        """Returns what is known here of a task type."""
        known = self._known.get(task_type)
        if known is None and len(self._unread) < TYPES_REMEMBERED:
            self._unread.add(task_type)
        return known

    def predicted_s(self, task_type: int | None) -> float:
        """Returns the median of a task type, seconds; 0 if it is not known."""
        if task_type is None:
            return 0.0
        median = self._medians.get(task_type)
        if median is None:
            self.sketch(task_type)
            return 0.0
        return median

    async def run(self) -> None:
        """Writes and reads until it is cancelled."""
        pace = Pace(WRITE_INTERVAL_S)
        while True:
            await pace.next()
            try:
                await self.work_once()
            except DatabaseUnavailable:
                continue

    async def work_once(self) -> None:
        """Writes what was learned; reads what was asked for, and now and then everything that is in use."""
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
