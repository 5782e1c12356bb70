"""DurationTracker: quantiles within their bound, learned from successes, written in batches, shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import DatabaseUnavailable
from fulmen.ids import uuid7
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.rollouts.transitions import FailureKind, RolloutState
from fulmen_store.scheduling.duration_sketch import RELATIVE_ERROR, DurationSketch, bucket_of
from fulmen_store.scheduling.durations import READ_INTERVAL_S, DurationTracker
from fulmen_store.scheduling.fair_queue import ReadyItem
from tests.support.store.manual_clock import ManualClock

SLACK = 1e-9


class MemoryDurations:
    """Counts in memory, shared by all who hold it; `down` makes it unavailable."""

    def __init__(self) -> None:
        self.sketches: dict[int, DurationSketch] = {}
        self.commits = 0
        self.down = False

    async def add(self, counts: Mapping[tuple[int, int], int]) -> None:
        if self.down:
            raise DatabaseUnavailable("down")
        self.commits += 1
        for (task_type, bucket), count in counts.items():
            self.sketches.setdefault(task_type, DurationSketch()).add(bucket, count)

    async def read(self, task_types: Sequence[int]) -> Mapping[int, DurationSketch]:
        return {one: self.sketches[one] for one in task_types if one in self.sketches}


def ended(task_type: int | None, duration_s: float, kind: FailureKind = FailureKind.NONE) -> EndedAttempt:
    return EndedAttempt(
        item=ReadyItem(rollout_id=uuid7(), project_id=1, task_type=task_type),
        session_id=uuid7(),
        epoch=1,
        kind=kind,
        rollout_state=RolloutState.FAILED if kind else RolloutState.SUCCEEDED,
        duration_s=duration_s,
    )


@given(
    samples=st.lists(st.floats(0.001, 86_400), min_size=1, max_size=200),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.95, 0.99, 1.0]),
)
def test_a_quantile_is_within_two_percent_of_the_sample_of_its_rank(samples: list[float], share: float) -> None:
    sketch = DurationSketch()
    for sample in samples:
        sketch.add(bucket_of(sample))
    exact = float(np.quantile(samples, share, method="lower"))
    assert abs(sketch.quantile_s(share) - exact) <= RELATIVE_ERROR * exact * (1 + SLACK) + SLACK


def test_a_sketch_that_measured_nothing_expects_nothing() -> None:
    assert DurationSketch().quantile_s(0.5) == 0


@given(st.floats(0, 1e9))
def test_every_duration_has_a_bucket_that_the_table_can_hold(duration_s: float) -> None:
    assert 0 <= bucket_of(duration_s) <= 32_767


async def test_only_attempts_that_succeeded_teach_in_one_write_for_all() -> None:
    table = MemoryDurations()
    durations = DurationTracker(table, clock=ManualClock())
    durations.learn([ended(1, 4.0) for _ in range(9)] + [ended(2, 50.0), ended(None, 1.0)])
    durations.learn([ended(1, 900.0, FailureKind.TIMEOUT), ended(1, 900.0, FailureKind.AGENT_ERROR)])
    assert durations.predicted_s(1) == 0
    await durations.run_once()
    assert table.commits == 1
    assert table.sketches[1].total == 9
    assert durations.predicted_s(1) == pytest.approx(4.0, rel=RELATIVE_ERROR)
    assert durations.predicted_s(2) == pytest.approx(50.0, rel=RELATIVE_ERROR)
    assert durations.predicted_s(None) == 0
    await durations.run_once()
    assert table.commits == 1


async def test_another_replica_and_the_next_start_know_what_was_learned() -> None:
    table, clock = MemoryDurations(), ManualClock(100.0)
    one, other = DurationTracker(table, clock=clock), DurationTracker(table, clock=clock)
    one.learn([ended(1, 4.0)])
    await one.run_once()
    assert other.predicted_s(1) == 0
    await other.run_once()
    assert other.predicted_s(1) == pytest.approx(4.0, rel=RELATIVE_ERROR)
    one.learn([ended(1, 60.0) for _ in range(5)])
    await one.run_once()
    clock.now_s += READ_INTERVAL_S
    await other.run_once()
    assert other.predicted_s(1) == pytest.approx(60.0, rel=RELATIVE_ERROR)


async def test_what_could_not_be_written_is_written_later() -> None:
    table = MemoryDurations()
    durations = DurationTracker(table, clock=ManualClock())
    durations.learn([ended(1, 4.0)])
    table.down = True
    with pytest.raises(DatabaseUnavailable):
        await durations.run_once()
    table.down = False
    durations.learn([ended(1, 4.0)])
    await durations.run_once()
    assert table.sketches[1].total == 2


async def test_a_bound_needs_enough_attempts_and_is_never_below_a_second() -> None:
    table, clock = MemoryDurations(), ManualClock()
    tracker = DurationTracker(table, clock=clock)
    assert tracker.bound_s(7, 0.95, 2.0) is None
    tracker.learn([ended(7, 10.0)] * 19)
    await tracker.run_once()
    assert tracker.bound_s(7, 0.95, 2.0) is None
    tracker.learn([ended(7, 10.0)])
    await tracker.run_once()
    assert tracker.bound_s(7, 0.95, 2.0) == pytest.approx(20.0, rel=0.02)
    assert tracker.bound_s(7, 0.95, 0.0) == pytest.approx(30.0, rel=0.02)
    # A hundredth of 20 attempts is none.
    assert tracker.bound_s(7, 0.99, 2.0) is None
    tracker.learn([ended(8, 0.001)] * 100)
    await tracker.run_once()
    assert tracker.bound_s(8, 0.99, 2.0) == 1.0
