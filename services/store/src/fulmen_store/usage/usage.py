"""Usage of model calls, and the rate limits that proxy processes share.

Invariants: usage is counted exactly once, by the sequence number of the reporting process; windows replace one another,
so a lost or repeated request has no lasting effect.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from uuid import UUID

from fulmen.ids import AttemptName

__all__ = [
    "UsageReport",
    "Grouping",
    "LimitKey",
    "OtherWindows",
    "Selection",
    "SpendEntry",
    "Spends",
    "StoredSpend",
    "StoredUsage",
    "UsageEntry",
    "UsageGroup",
    "Window",
    "merged",
    "slot_of",
]

UUID_TIME_SHIFT: Final = 80
SLOT_S: Final = 3
# The current slot and those before it within a minute.
SLOTS: Final = 21


UsageCounts = tuple[int, int, int, int, int, int]
"""Calls, failed calls, prompt tokens, cached prompt tokens, sampled tokens, millionths of a dollar."""

LimitKey = tuple[str, str, str]
"""Names of project, backend and attempt; backend and attempt are empty if the limit is not theirs."""

StoredUsage = tuple[int, UUID | None, int | None, str, str, int, int, int, int, int, int]
"""Project, rollout, attempt, model, backend, then the counts."""


StoredSpend = tuple[int, str, int, int]
"""Project, subject and period of a budget, millionths of a dollar."""

Spends = dict[tuple[str, str, int], int]
"""Millionths of a dollar by name of the project, subject and period."""


class Grouping(IntEnum):
    """The grouping of usage."""

    NONE = 0
    MODEL = 1
    BACKEND = 2
    TRAINING_RUN = 3
    ROLLOUT = 4
    ATTEMPT = 5
    AGENT = 6
    PROJECT = 7

    @property
    def is_by_attempt(self) -> bool:
        """Whether only calls of attempts are grouped."""
        return Grouping.TRAINING_RUN <= self <= Grouping.AGENT


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry:
    """Usage of one project, attempt, model and backend; without an attempt if the calls belong to none."""

    project: str
    rollout_id: UUID | None
    attempt: int | None
    model: str
    backend: str
    counts: UsageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendEntry:
    """Cost of calls to which a budget applies, millionths of a dollar."""

    project: str
    subject: str
    period: int
    cost_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """A report of a proxy process.

    Attributes:
        scope: Project of its token, or `projects/*`.
        windows: Rate-limit windows in stored form.
        window_count: Number of windows.
        slot: Newest slot of the windows, in slots since 1970.
        attempts: Attempts that have a window.
    """

    instance_id: str
    scope: str
    sequence: int
    entries: Sequence[UsageEntry]
    spend: Sequence[SpendEntry]
    windows: bytes
    window_count: int
    slot: int
    attempts: Sequence[AttemptName]


@dataclass(slots=True, kw_only=True)
class Window:
    """The state of one limit: calls and tokens by slot, newest first, running calls, and their reserved tokens."""

    key: LimitKey
    requests: Sequence[int]
    tokens: Sequence[int]
    in_flight: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWindows:
    """The latest windows of another process; `is_live` is True if they are at most a few seconds old."""

    slot: int
    is_live: bool
    windows: Sequence[Window]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selection of usage to sum up.

    Attributes:
        run_id: Training run; None for all.
        after: Name after which the groups begin.
    """

    project_id: int
    run_id: int | None
    rollout_id: UUID | None
    start: datetime.datetime | None
    end: datetime.datetime | None
    grouping: Grouping
    after: str | None

    @property
    def is_by_attempt(self) -> bool:
        """Whether only calls of attempts are selected."""
        return self.grouping.is_by_attempt or self.run_id is not None or self.rollout_id is not None

    @property
    def rollouts(self) -> tuple[UUID, UUID]:
        """First and last rollout id in the selection; ids are ordered by creation time (UUID version 7)."""
        first = 0 if self.start is None else _unix_ms(self.start) << UUID_TIME_SHIFT
        last = (1 << 128 if self.end is None else max(1, _unix_ms(self.end) << UUID_TIME_SHIFT)) - 1
        if self.rollout_id is not None:
            first, last = max(first, self.rollout_id.int), min(last, self.rollout_id.int)
        return UUID(int=first), UUID(int=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageGroup:
    """Sum of one group; a rollout is named by its id, an attempt by its rollout's id and its padded number."""

    name: str
    counts: UsageCounts


def _unix_ms(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1000)


def slot_of(moment: datetime.datetime) -> int:
    """Returns the slot of a time, in slots since 1970."""
    return int(moment.timestamp() // SLOT_S)


def merged(others: Iterable[OtherWindows], *, slot: int, wanted: Callable[[LimitKey], bool]) -> list[Window]:
    """Sums up the windows of other processes, as of a slot.

    Args:
        others: Latest windows of each process.
        slot: Current slot.
        wanted: Predicate for the limits to include.
    """
    sums: dict[LimitKey, Window] = {}
    for other in others:
        # If a process's clock is ahead, treat its newest slot as the current one.
        age = max(0, slot - other.slot)
        for window in other.windows:
            if not wanted(window.key):
                continue
            known = sums.get(window.key)
            if known is None:
                nothing = [0] * SLOTS
                known = sums[window.key] = Window(
                    key=window.key, requests=nothing, tokens=list(nothing), in_flight=0, reserved=0
                )
            known.requests = _added(known.requests, window.requests, age)
            known.tokens = _added(known.tokens, window.tokens, age)
            if other.is_live:
                known.in_flight += window.in_flight
                known.reserved += window.reserved
    return [one for one in sums.values() if one.in_flight or one.reserved or any(one.requests) or any(one.tokens)]


def _added(sums: Sequence[int], counts: Sequence[int], age: int) -> list[int]:
    added = list(sums)
    for index, count in enumerate(counts[: max(0, SLOTS - age)], start=age):
        added[index] += count
    return added
