"""What model calls used, and the limits that the proxy's processes hold together.

Invariants: usage counts exactly once, by the sequence of the process that tells it; windows are states that replace one
another, so that a lost or doubled exchange leaves nothing behind.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol
from uuid import UUID

from fulmen.errors import ProjectNotFound, Violation
from fulmen_store.domain.malformed import malformed_request

__all__ = [
    "NO_COUNTS",
    "Exchange",
    "Grouping",
    "LimitKey",
    "OtherWindows",
    "Selection",
    "StoredUsage",
    "UsageEntry",
    "UsageExchange",
    "UsageGroup",
    "UsageTable",
    "WindowCounts",
    "merged",
]

MAX_ENTRIES: Final = 5_000
MAX_WINDOWS: Final = 10_000
MAX_MODEL: Final = 128
MAX_BACKEND: Final = 128
MAX_COUNT: Final = 10**15
MAX_SEQUENCE: Final = 2**62

_INSTANCE: Final = re.compile(r"[A-Za-z0-9-]{1,64}")

UsageCounts = tuple[int, int, int, int, int, int]
"""Calls, failed ones, tokens of prompts, cached ones of them, sampled tokens, millionths of a dollar."""

WindowCounts = tuple[int, int, int, int, int, int]
"""Calls and tokens of the minute, calls and tokens of the minute before, calls that run, tokens that they reserve."""

LimitKey = tuple[str, str, str]
"""Names of project, backend and attempt; the last two are empty where the limit is not theirs."""

NO_COUNTS: Final[WindowCounts] = (0, 0, 0, 0, 0, 0)

StoredUsage = tuple[int, UUID | None, int | None, str, str, int, int, int, int, int, int]
"""Project, rollout, attempt, model, backend, and the counts."""


class Grouping(IntEnum):
    """By what usage is summed up."""

    NONE = 0
    MODEL = 1
    BACKEND = 2
    TRAINING_RUN = 3
    ROLLOUT = 4
    ATTEMPT = 5

    @property
    def is_by_attempt(self) -> bool:
        """Whether only the calls of attempts have what it groups by."""
        return self >= Grouping.TRAINING_RUN


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEntry:
    """What calls of one project, attempt, model and backend used; without an attempt if they belong to none."""

    project: str
    rollout_id: UUID | None
    attempt: int | None
    model: str
    backend: str
    counts: UsageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a process tells.

    Attributes:
        scope: the project of its token, or `projects/*`.
        windows: its limits, serialized as they are stored.
        window_count: how many these are.
        minute: theirs, in minutes since 1970.
        attempts: those among its limits.
    """

    instance_id: str
    scope: str
    sequence: int
    entries: Sequence[UsageEntry]
    windows: bytes
    window_count: int
    minute: int
    attempts: Sequence[tuple[UUID, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWindows:
    """What another process said last; `is_live` if that was within the last seconds."""

    minute: int
    is_live: bool
    windows: Sequence[tuple[LimitKey, WindowCounts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The usage to sum up.

    Attributes:
        run_id: only this training run.
        after: only groups whose name is above.
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
        """Whether it is about attempts; the calls of nobody in particular are then left out."""
        return self.grouping.is_by_attempt or self.run_id is not None or self.rollout_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageGroup:
    """The sum of one group."""

    name: str
    counts: UsageCounts


class UsageTable(Protocol):
    """Where usage is kept."""

    async def add(self, instance_id: str, sequence: int, rows: Sequence[StoredUsage]) -> bool:
        """Adds usage in one commit; returns False if this sequence of the instance was added before."""
        ...

    async def keep_windows(self, exchange: Exchange) -> None:
        """Replaces what an instance said of its limits."""
        ...


class UsageExchange:
    """Takes what processes tell."""

    def __init__(self, *, table: UsageTable, project_id: Callable[[str], Awaitable[int]]) -> None:
        """Takes the table, and the function that finds a project's number, or raises `ProjectNotFound`."""
        self._table = table
        self._project_id = project_id

    async def take(self, exchange: Exchange, *, may_access: Callable[[str], bool]) -> int:
        """Counts usage once and keeps the windows; returns how many entries were dropped.

        Raises:
            ArgumentInvalid: with every problem; nothing was counted.
            DatabaseUnavailable: if it is not known whether it was counted; send the same again.
        """
        problems = list(_problems(exchange))
        if problems:
            raise malformed_request(problems)
        rows: list[StoredUsage] = []
        for entry in exchange.entries:
            project_id = await self._find(entry.project) if may_access(entry.project) else None
            if project_id is not None:
                place = (project_id, entry.rollout_id, entry.attempt, entry.model, entry.backend)
                rows.append((*place, *entry.counts))
        if rows:
            await self._table.add(exchange.instance_id, exchange.sequence, rows)
        await self._table.keep_windows(exchange)
        return len(exchange.entries) - len(rows)

    async def _find(self, project: str) -> int | None:
        try:
            return await self._project_id(project)
        except ProjectNotFound:
            return None


def merged(
    others: Iterable[OtherWindows], *, minute: int, wanted: Callable[[LimitKey], bool]
) -> dict[LimitKey, WindowCounts]:
    """Sums up what other processes said, as of a minute.

    Args:
        others: what each said last.
        minute: the present one, in minutes since 1970; what a process said in the one before is of the one before now.
        wanted: tells which limits are asked for.
    """
    sums: dict[LimitKey, WindowCounts] = {}
    for other in others:
        age = minute - other.minute
        for key, counts in other.windows:
            if not wanted(key):
                continue
            known = sums.get(key, NO_COUNTS)
            now = _aged(counts, age, is_live=other.is_live)
            if any(now):
                sums[key] = tuple(a + b for a, b in zip(known, now, strict=True))  # type: ignore[assignment]  # six
    return sums


def _aged(counts: WindowCounts, age: int, *, is_live: bool) -> WindowCounts:
    requests, tokens, requests_before, tokens_before, in_flight, reserved = counts
    running = (in_flight, reserved) if is_live else (0, 0)
    if age <= 0:
        # A process whose clock is ahead: its minute is taken for the present one.
        return (requests, tokens, requests_before, tokens_before, *running)
    if age == 1:
        return (0, 0, requests, tokens, *running)
    return (0, 0, 0, 0, *running)


def _problems(exchange: Exchange) -> Iterator[Violation]:
    if not _INSTANCE.fullmatch(exchange.instance_id):
        yield _violation("instance_id", "is not 1 to 64 of [A-Za-z0-9-]")
    if exchange.entries and not 1 <= exchange.sequence <= MAX_SEQUENCE:
        yield _violation("sequence", "is needed with usage, from 1 on")
    if len(exchange.entries) > MAX_ENTRIES:
        yield _violation("usage", f"has more than {MAX_ENTRIES} entries")
    if exchange.window_count > MAX_WINDOWS:
        yield _violation("windows", f"has more than {MAX_WINDOWS} entries")
    if not 0 <= exchange.minute <= MAX_COUNT:
        yield _violation("minute", "is out of range")
    for index, entry in enumerate(exchange.entries[:MAX_ENTRIES]):
        if not 1 <= len(entry.model) <= MAX_MODEL or "\0" in entry.model:
            yield _violation(f"usage[{index}].model", f"has not 1 to {MAX_MODEL} characters")
        if len(entry.backend) > MAX_BACKEND or "\0" in entry.backend:
            yield _violation(f"usage[{index}].backend", f"has more than {MAX_BACKEND} characters")
        if not all(0 <= count <= MAX_COUNT for count in entry.counts):
            yield _violation(f"usage[{index}].usage", "has a number outside 0 to 10^15")


def _violation(path: str, description: str) -> Violation:
    return Violation(field=path, description=description)
