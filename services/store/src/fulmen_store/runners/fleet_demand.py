"""How much work there is, and how many runners it wants.

Counting looks at every live row, so a long queue is counted rarely, whoever asks: for its metrics every replica counts
every 15 s, and never for more than a twentieth of its time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fulmen.errors import DatabaseUnavailable
from fulmen_store.periodic import Pace
from fulmen_store.scheduling.durations import DurationSketch
from fulmen_store.scheduling.fair_queue import Labels

__all__ = [
    "Demand",
    "DemandQuery",
    "DemandTable",
    "FleetDemand",
    "LabelDemand",
    "QueueCensus",
    "WaitingWork",
    "by_labels",
    "demand_of",
]

FRESH_S: Final = 1.0
TTL_PER_COST: Final = 20.0
COUNT_INTERVAL_S: Final = 15.0
# Durations of so many kinds are looked up, those with the most waiting rollouts; the rest take what the project's do.
TYPES_LOOKED_UP: Final = 1000
DEFAULT_DURATION_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingWork:
    """The live rollouts of one project, one set of labels and one task type.

    Attributes:
        max_running: how many of the project may run at once; None: any number.
        match_labels: whether they go only to runners that have their labels.
        task_type: None: they named none.
        queued: how many wait for a runner now.
    """

    project: str
    max_running: int | None
    match_labels: bool
    labels: Labels
    task_type: int | None
    queued: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCensus:
    """All live rollouts at one moment, and how long attempts of their task types take on average, seconds.

    Attributes:
        samples: how many attempts each average is of.
        counted_at: monotonic seconds.
    """

    work: Sequence[WaitingWork]
    mean_s: Mapping[int, float]
    samples: Mapping[int, int]
    counted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandQuery:
    """Whose work, for which runners, and how fast.

    Attributes:
        project: None: all.
        labels: those of the runners that are to be started.
        target_drain_s: within what time the queue is to be worked off.
        default_duration_s: what an attempt takes of whose kind nothing is known.
    """

    project: str | None = None
    labels: Labels = frozenset()
    target_drain_s: float = 60.0
    slots_per_runner: int = 64
    default_duration_s: float = DEFAULT_DURATION_S
    min_runners: int = 0
    max_runners: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The answer; `predicted_work_s` is what the queued ones take one after the other."""

    runners: int
    slots: int
    queued: int
    running: int
    predicted_work_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelDemand:
    """What waits of one project for one set of labels, for the metrics."""

    project: str
    labels: Labels
    queued: int
    running: int
    predicted_work_s: float


@dataclass(slots=True)
class _Sum:
    queued: int = 0
    running: int = 0
    work_s: float = 0.0
    max_running: int | None = None

    def slots(self, target_drain_s: float) -> int:
        """Returns the slots that this work wants.

        What runs keeps its slot. Of what waits, as many run side by side as it takes to be done in time, each in a slot
        of its own at most; beyond its quota a project uses none.
        """
        side_by_side = min(self.queued, math.ceil(self.work_s / target_drain_s))
        wanted = self.running + side_by_side
        return wanted if self.max_running is None else min(wanted, max(self.max_running, self.running))


def demand_of(census: QueueCensus, query: DemandQuery) -> Demand:
    """Computes how many runners the work wants."""
    duration_s = _predictor(census, query.default_duration_s)
    projects: defaultdict[str, _Sum] = defaultdict(_Sum)
    for work in census.work:
        fits = not work.match_labels or work.labels <= query.labels
        if fits and query.project in (None, work.project):
            _add(projects[work.project], work, duration_s(work))
    slots = sum(each.slots(query.target_drain_s) for each in projects.values())
    runners = math.ceil(slots / query.slots_per_runner)
    return Demand(
        runners=max(query.min_runners, min(query.max_runners, runners)),
        slots=slots,
        queued=sum(each.queued for each in projects.values()),
        running=sum(each.running for each in projects.values()),
        predicted_work_s=sum(each.work_s for each in projects.values()),
    )


def by_labels(census: QueueCensus) -> list[LabelDemand]:
    """Sums the work up by project and labels, the longest first."""
    duration_s = _predictor(census, DEFAULT_DURATION_S)
    sums: defaultdict[tuple[str, Labels], _Sum] = defaultdict(_Sum)
    for work in census.work:
        _add(sums[work.project, work.labels], work, duration_s(work))
    found = [
        LabelDemand(
            project=project, labels=labels, queued=each.queued, running=each.running, predicted_work_s=each.work_s
        )
        for (project, labels), each in sums.items()
    ]
    return sorted(found, key=lambda one: (-one.predicted_work_s, one.project, sorted(one.labels)))


def _add(total: _Sum, work: WaitingWork, duration_s: float) -> None:
    total.queued += work.queued
    total.running += work.running
    total.work_s += work.queued * duration_s
    total.max_running = work.max_running


def _predictor(census: QueueCensus, default_s: float) -> Callable[[WaitingWork], float]:
    """Returns what tells how long an attempt takes: its task type's mean, or its project's, or the default."""
    weights: defaultdict[str, int] = defaultdict(int)
    totals: defaultdict[str, float] = defaultdict(float)
    for project, task_type in {(work.project, work.task_type) for work in census.work}:
        if task_type is not None and task_type in census.mean_s:
            weights[project] += census.samples[task_type]
            totals[project] += census.samples[task_type] * census.mean_s[task_type]

    def duration_s(work: WaitingWork) -> float:
        if work.task_type is not None and work.task_type in census.mean_s:
            return census.mean_s[work.task_type]
        return totals[work.project] / weights[work.project] if weights[work.project] else default_s

    return duration_s


class DemandTable(Protocol):
    """Where live rollouts are counted."""

    async def work(self) -> Sequence[WaitingWork]:
        """Counts all live rollouts."""
        ...


class DurationReader(Protocol):
    """Where durations are read."""

    async def read(self, task_types: Sequence[int]) -> Mapping[int, DurationSketch]:
        """Returns what is known of task types."""
        ...


class FleetDemand:
    """Background role: counts now and then for the metrics, and for whoever asks."""

    def __init__(
        self, *, table: DemandTable, durations: DurationReader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the tables, and monotonic seconds."""
        self._table = table
        self._durations = durations
        self._clock = clock
        self._lock = asyncio.Lock()
        self._census: QueueCensus | None = None
        self._stale_at = -math.inf

    async def run(self) -> None:
        """Counts until it is cancelled."""
        pace = Pace(COUNT_INTERVAL_S)
        while True:
            try:
                await self.census()
            except DatabaseUnavailable:
                self._census = None
            await pace.next()

    def shown(self) -> list[LabelDemand]:
        """Returns what was counted last, for the metrics; nothing if it could not be."""
        return [] if self._census is None else by_labels(self._census)

    async def census(self) -> QueueCensus:
        """Counts, or returns what was counted a moment ago.

        Raises:
            DatabaseUnavailable: if the rollouts cannot be counted.
        """
        async with self._lock:
            began = self._clock()
            if self._census is None or began >= self._stale_at:
                self._census = await self._count(began)
                now = self._clock()
                self._stale_at = now + max(FRESH_S, TTL_PER_COST * (now - began))
            return self._census

    async def demand(self, query: DemandQuery) -> tuple[Demand, float]:
        """Returns how many runners the work wants, and how old the figures are, seconds.

        Raises:
            DatabaseUnavailable: if the rollouts cannot be counted.
        """
        census = await self.census()
        return demand_of(census, query), max(0.0, self._clock() - census.counted_at)

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
