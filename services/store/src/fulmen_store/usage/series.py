"""Usage of model calls in time: the periods, and the series of each group."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final
from uuid import UUID

from fulmen_store.malformed import malformed
from fulmen_store.usage.usage import UUID_TIME_SHIFT, Grouping, UsageCounts

__all__ = ["Period", "Periods", "Series", "SeriesRow", "SeriesSelection", "first_id", "periods_of", "series_of"]

MAX_PERIODS: Final = 750
"""A month of hours, two years of days."""


class Period(IntEnum):
    """The length of the periods."""

    HOUR = 1
    DAY = 2

    @property
    def length(self) -> datetime.timedelta:
        """How long each lasts."""
        return datetime.timedelta(hours=1) if self is Period.HOUR else datetime.timedelta(days=1)

    @property
    def usual_count(self) -> int:
        """The number of periods unless a start is given."""
        return 48 if self is Period.HOUR else 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Periods:
    """Consecutive periods of equal length."""

    start: datetime.datetime
    length: datetime.timedelta
    count: int

    @property
    def end(self) -> datetime.datetime:
        """End of the last one."""
        return self.begin(self.count)

    @property
    def starts_and_end(self) -> list[datetime.datetime]:
        """The start of each, and the end of the last."""
        return [self.begin(place) for place in range(self.count + 1)]

    def begin(self, place: int) -> datetime.datetime:
        """Returns the start of the period in a place, from 0."""
        return self.start + place * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSelection:
    """Selection of usage in time.

    Attributes:
        project_ids: Projects; None for all.
        run_id: Training run; None for all.
        max_series: Number of groups that are not summed up with the others.
    """

    project_ids: Sequence[int] | None
    run_id: int | None
    periods: Periods
    grouping: Grouping
    max_series: int

    @property
    def is_by_attempt(self) -> bool:
        """Whether only calls of attempts are selected."""
        return self.grouping.is_by_attempt or self.run_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRow:
    """What a group, or those behind the last place together, used in a period; both count: places from 1, periods from 0."""

    place: int
    period: int
    name: str
    counts: UsageCounts
    total_count: int


@dataclass(slots=True, kw_only=True)
class Series:
    """A group: its sum, and what it used in each period in which it did."""

    name: str
    total: UsageCounts = (0, 0, 0, 0, 0, 0)
    points: list[tuple[int, UsageCounts]] = field(default_factory=list)


def periods_of(
    period: Period, *, start: datetime.datetime | None, end: datetime.datetime, first: datetime.datetime
) -> Periods:
    """Returns the full periods that hold a time.

    Args:
        period: Their length.
        start: Start of the time; None for as long as is usual.
        end: Its end.
        first: The earliest period.

    Raises:
        ArgumentInvalid: If there are none, or more than the maximum.
    """
    length = period.length
    last = -(-(end - first) // length)
    begin = last - period.usual_count if start is None else (start - first) // length
    begin = max(0, begin)
    if begin >= last:
        raise malformed("end_time", "is not after start_time")
    if last - begin > MAX_PERIODS:
        text = f"is {last - begin} periods before end_time, allowed are {MAX_PERIODS}. Use days, or a later start"
        raise malformed("start_time", text)
    return Periods(start=first + begin * length, length=length, count=last - begin)


def first_id(moment: datetime.datetime) -> UUID:
    """Returns the lowest id of a rollout of a time (UUID version 7)."""
    return UUID(int=int(moment.timestamp() * 1000) << UUID_TIME_SHIFT)


def series_of(rows: Iterable[SeriesRow], *, max_series: int) -> tuple[list[Series], Series | None, int]:
    """Returns the series in order, the sum of the other groups if there are any, and the number of these."""
    found: dict[int, Series] = {}
    total_count = 0
    for row in rows:
        total_count = row.total_count
        one = found.setdefault(row.place, Series(name=row.name))
        one.points.append((row.period, row.counts))
        one.total = _sum(one.total, row.counts)
    others = found.pop(max_series + 1, None)
    if others is not None:
        others.name = ""
    return list(found.values()), others, max(0, total_count - max_series)


def _sum(one: UsageCounts, other: UsageCounts) -> UsageCounts:
    requests, failures, prompt, cached, completion, cost = (a + b for a, b in zip(one, other, strict=True))
    return requests, failures, prompt, cached, completion, cost
