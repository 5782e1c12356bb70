"""Events of training runs as values, and the limits of what is kept and read."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from fulmen.errors import Violation

__all__ = [
    "Axis",
    "Curve",
    "Distribution",
    "HistoryEvent",
    "Notice",
    "RunCurves",
    "StepMeasured",
    "curve_problems",
    "event_problems",
]

MAX_EVENTS: Final = 500
MAX_METRICS: Final = 512
MAX_METRIC_NAME: Final = 128
MAX_VALUES: Final = 64
MAX_SEQUENCE: Final = 2**62
MAX_RUNS: Final = 50
MAX_CURVES: Final = 64
MIN_POINTS: Final = 2
MAX_POINTS: Final = 2000
MAX_POINTS_IN_ALL: Final = 200_000
SEVERITIES: Final = frozenset({"info", "warning", "error"})


class Axis(IntEnum):
    """What curves are drawn over; numbers as in the protos."""

    STEP = 1
    TIME = 2
    TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Rewards of a step; fields as in `fulmen.type.v1.RewardDistribution`."""

    values: Sequence[float]
    counts: Sequence[int]
    bin_width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """What a step measured."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    rewards: Distribution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A message for a person."""

    severity: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEvent:
    """One event; exactly one of `measured`, `notice` and `rolled_back_to_step` is set."""

    sequence: int
    time: datetime.datetime
    measured: StepMeasured | None = None
    notice: Notice | None = None
    rolled_back_to_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedNotice:
    """A notice with the step that was measured last before it; 0 if none was."""

    sequence: int
    time: datetime.datetime
    step: int
    notice: Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of a metric; fields as in `fulmen.store.v1.RunCurve`."""

    metric: str
    positions: Sequence[float]
    values: Sequence[float]
    measurement_count: int
    not_finite_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """Curves of a run; fields as in `fulmen.store.v1.RunMetrics`."""

    curves: Sequence[Curve]
    metric_names: Sequence[str]
    last_sequence: int
    first_time: datetime.datetime | None


def event_problems(events: Sequence[HistoryEvent]) -> Iterator[Violation]:
    """Yields every problem of events to append."""
    if len(events) > MAX_EVENTS:
        yield Violation(field="events", description=f"has {len(events)} entries, allowed are {MAX_EVENTS}")
        return
    before = 0
    for index, event in enumerate(events):
        place = f"events[{index}]"
        if not before < event.sequence <= MAX_SEQUENCE:
            yield Violation(
                field=f"{place}.sequence", description="is not greater than the one before it, or too large"
            )
        before = max(before, event.sequence)
        yield from _problems(place, event)


def curve_problems(*, runs: int, metrics: int, points: int) -> Iterator[Violation]:
    """Yields every problem of the size of an answer with curves."""
    for name, count, least, most in (
        ("training_runs", runs, 1, MAX_RUNS),
        ("metrics", metrics, 0, MAX_CURVES),
    ):
        if not least <= count <= most:
            yield Violation(field=name, description=f"has {count} entries, allowed are {least} to {most}")
    if not MIN_POINTS <= points <= MAX_POINTS:
        yield Violation(field="max_points", description=f"is {points}, allowed are {MIN_POINTS} to {MAX_POINTS}")
    elif runs * metrics * points > MAX_POINTS_IN_ALL:
        text = f"makes {runs * metrics * points} points in all, at most {MAX_POINTS_IN_ALL} are allowed: request fewer, or in parts"
        yield Violation(field="max_points", description=text)


def _problems(place: str, event: HistoryEvent) -> Iterator[Violation]:
    given = (event.measured, event.notice, event.rolled_back_to_step)
    if sum(each is not None for each in given) != 1:
        yield Violation(field=place, description="is neither a step nor a notice nor a rollback")
    if event.notice is not None and event.notice.severity not in SEVERITIES:
        yield Violation(field=f"{place}.notice.severity", description=f"is not one of {', '.join(sorted(SEVERITIES))}")
    step = event.rolled_back_to_step if event.measured is None else event.measured.step
    if step is not None and not 0 <= step <= MAX_SEQUENCE:
        yield Violation(field=f"{place}.step", description=f"is {step}, allowed are 0 to {MAX_SEQUENCE}")
    if event.measured is None:
        return
    values, rewards = event.measured.values, event.measured.rewards
    if len(values) > MAX_METRICS or any(not 0 < len(name) <= MAX_METRIC_NAME for name in values):
        text = f"has more than {MAX_METRICS} metrics, or a name without or with more than {MAX_METRIC_NAME} characters"
        yield Violation(field=f"{place}.step.values", description=text)
    if rewards is not None and not len(rewards.values) == len(rewards.counts) <= MAX_VALUES:
        text = f"has more than {MAX_VALUES} values, or not one count for each"
        yield Violation(field=f"{place}.step.rewards", description=text)
