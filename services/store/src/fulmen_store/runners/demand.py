"""The number of runners that waiting and running work needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fulmen_store.runners.forecast import DemandForecast, ForecastErrors
from fulmen_store.scheduling.fair_queue import Labels

__all__ = [
    "Demand",
    "DemandQuery",
    "LabelDemand",
    "QueueCensus",
    "WaitingWork",
    "by_labels",
    "demand_of",
    "with_forecast",
]

DEFAULT_DURATION_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingWork:
    """The live rollouts of one project, one set of labels and one task type.

    Attributes:
        max_running: Maximum number of running rollouts of the project; None if unlimited.
        match_labels: Whether only runners with their labels may run them.
        task_type: Number of their task type; None if they have none.
        queued: Number of rollouts that wait for a runner.
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
    """Counts of all live rollouts, and the mean duration of attempts by task type, seconds.

    Attributes:
        samples: Number of attempts behind each mean.
        counted_at: Monotonic seconds.
    """

    work: Sequence[WaitingWork]
    mean_s: Mapping[int, float]
    samples: Mapping[int, int]
    counted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandQuery:
    """The work and the runners of a demand.

    Attributes:
        project: Project to count; None for all.
        labels: Labels of the runners to be started.
        target_drain_s: Time in which the queue should drain, seconds.
        default_duration_s: Duration of attempts of unknown task types, seconds.
        forecast_s: How far ahead the demand is forecast, seconds; 0: not at all.
    """

    project: str | None = None
    labels: Labels = frozenset()
    target_drain_s: float = 60.0
    slots_per_runner: int = 64
    default_duration_s: float = DEFAULT_DURATION_S
    min_runners: int = 0
    max_runners: int = 10_000
    forecast_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand.

    Attributes:
        predicted_work_s: Sum of the durations of the queued rollouts, seconds.
        forecast_slots: Slots that will be wanted, of which there are at least as many in `slots`; None without a forecast.
        errors: Those of the forecasts of the last hour; None if too few were made.
    """

    runners: int
    slots: int
    queued: int
    running: int
    predicted_work_s: float
    forecast_slots: int | None = None
    errors: ForecastErrors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelDemand:
    """The waiting rollouts of one project and one set of labels, for the metrics."""

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
        """Returns the number of slots for this work.

        Running rollouts keep their slots. Waiting ones get as many as drain the queue in time, at most one each, within the
        project's quota.
        """
        side_by_side = min(self.queued, math.ceil(self.work_s / target_drain_s))
        wanted = self.running + side_by_side
        return wanted if self.max_running is None else min(wanted, max(self.max_running, self.running))


def demand_of(census: QueueCensus, query: DemandQuery) -> Demand:
    """Returns the number of runners for the work."""
    duration_s = _predictor(census, query.default_duration_s)
    projects: defaultdict[str, _Sum] = defaultdict(_Sum)
    for work in census.work:
        fits = not work.match_labels or work.labels <= query.labels
        if fits and query.project in (None, work.project):
            _add(projects[work.project], work, duration_s(work))
    slots = sum(each.slots(query.target_drain_s) for each in projects.values())
    return Demand(
        runners=_runners(slots, query),
        slots=slots,
        queued=sum(each.queued for each in projects.values()),
        running=sum(each.running for each in projects.values()),
        predicted_work_s=sum(each.work_s for each in projects.values()),
    )


def with_forecast(demand: Demand, query: DemandQuery, forecast: DemandForecast) -> Demand:
    """Returns a demand that is prepared for what is forecast; never less than it is now."""
    ahead = forecast.ahead()
    # Not rounded up: what fades would want a slot for ever.
    wanted = None if ahead is None else round(ahead)
    slots = max(demand.slots, wanted or 0)
    return replace(demand, slots=slots, runners=_runners(slots, query), forecast_slots=wanted, errors=forecast.errors())


def _runners(slots: int, query: DemandQuery) -> int:
    return max(query.min_runners, min(query.max_runners, math.ceil(slots / query.slots_per_runner)))


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
    """Returns a predictor of attempt durations: the mean of the task type, or of the project, or the default."""
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
