"""How many runners the work wants, whatever it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from fulmen_store.runners.demand import DemandQuery, QueueCensus, WaitingWork, by_labels, demand_of
from fulmen_store.runners.fleet_demand import MAX_FORECASTS, FleetDemand
from fulmen_store.scheduling.duration_sketch import DurationSketch, bucket_of
from tests.support.store.manual_clock import ManualClock

KNOWN = {1: 10.0, 2: 0.5}
H200 = frozenset({"gpu=h200"})


def work(
    queued: int,
    running: int = 0,
    *,
    project: str = "projects/a",
    labels: frozenset[str] = frozenset(),
    task_type: int | None = 1,
    max_running: int | None = None,
    match_labels: bool = True,
) -> WaitingWork:
    """Makes a part of a queue."""
    return WaitingWork(
        project=project, max_running=max_running, match_labels=match_labels, labels=labels, task_type=task_type,
        queued=queued, running=running,
    )  # fmt: skip


def census(*parts: WaitingWork) -> QueueCensus:
    """Makes a census in which types 1 and 2 are known."""
    return QueueCensus(work=parts, mean_s=KNOWN, samples={1: 1, 2: 3}, counted_at=0.0)


parts = st.lists(
    st.builds(
        work,
        st.integers(0, 10_000),
        st.integers(0, 500),
        project=st.sampled_from(("projects/a", "projects/b")),
        labels=st.sampled_from((frozenset(), H200)),
        task_type=st.sampled_from((1, 2, 3, None)),
    ),
    max_size=6,
)
queries = st.builds(
    DemandQuery,
    labels=st.sampled_from((frozenset(), H200)),
    target_drain_s=st.floats(1, 3600),
    slots_per_runner=st.integers(1, 100),
    default_duration_s=st.floats(0.01, 600),
    max_runners=st.integers(1, 300),
)


@given(parts, queries)
def test_the_wanted_runners_hold_what_runs_and_work_off_the_queue_in_time(
    given_work: list[WaitingWork], query: DemandQuery
) -> None:
    demand = demand_of(census(*given_work), query)
    assert query.min_runners <= demand.runners <= query.max_runners
    assert demand.running <= demand.slots <= demand.running + demand.queued
    assert (demand.slots == 0) == (demand.queued + demand.running == 0)
    if demand.runners < query.max_runners:
        assert demand.slots <= demand.runners * query.slots_per_runner < demand.slots + query.slots_per_runner
    for_queue = demand.slots - demand.running
    assert (
        for_queue == demand.queued
        or for_queue * query.target_drain_s >= demand.predicted_work_s * (1 - 1e-9)
        or (
            # Each project is rounded by itself; one may have fewer rollouts than slots that its work would fill.
            len({each.project for each in given_work}) > 1
        )
    )


@given(parts, queries, st.integers(1, 5000))
def test_more_work_never_wants_fewer_runners(given_work: list[WaitingWork], query: DemandQuery, more: int) -> None:
    before = demand_of(census(*given_work), query)
    after = demand_of(census(*given_work, work(more, project="projects/c")), query)
    assert after.runners >= before.runners


def test_short_attempts_want_fewer_runners_than_long_ones() -> None:
    query = DemandQuery(target_drain_s=60, slots_per_runner=10)
    # 600 * 10 s within 60 s are 100 slots; 600 * 0.5 s are 5.
    assert demand_of(census(work(600, task_type=1)), query).runners == 10
    assert demand_of(census(work(600, task_type=2)), query).runners == 1


def test_what_is_not_known_takes_as_long_as_the_project_usually_does_or_the_default() -> None:
    query = DemandQuery(default_duration_s=7.0)
    # The project's known attempts took (1 * 10 s + 3 * 0.5 s) / 4 on average.
    known = demand_of(census(work(0, task_type=1), work(0, task_type=2), work(4, task_type=3)), query)
    assert math.isclose(known.predicted_work_s, 11.5)
    assert demand_of(census(work(4, task_type=None)), query).predicted_work_s == 28.0


def test_a_quota_bounds_what_is_wanted_and_labels_say_for_whom_it_is() -> None:
    query = DemandQuery(target_drain_s=1, slots_per_runner=1)
    assert demand_of(census(work(100, 3, max_running=8)), query).slots == 8
    assert demand_of(census(work(100, 9, max_running=8)), query).slots == 9
    labelled = census(work(2), work(5, labels=H200), work(7, labels=frozenset({"gpu=a100"}), match_labels=False))
    assert demand_of(labelled, query).queued == 9
    assert demand_of(labelled, DemandQuery(labels=H200)).queued == 14
    assert demand_of(labelled, DemandQuery(project="projects/b")).slots == 0
    longest = by_labels(labelled)[0]
    assert (longest.queued, longest.labels) == (7, frozenset({"gpu=a100"}))


class Tables:
    """Counts, and how long that takes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cost_s = 0.0
        self.counts = 0

    async def work(self) -> Sequence[WaitingWork]:
        self.counts += 1
        self.clock.now_s += self.cost_s
        return [work(2, task_type=4), work(1, task_type=5)]

    async def read(self, task_types: Sequence[int]) -> Mapping[int, DurationSketch]:
        assert task_types == [4, 5]
        sketch = DurationSketch()
        sketch.add(bucket_of(1.0), 3)
        sketch.add(bucket_of(5.0), 1)
        return {4: sketch}


async def test_a_queue_that_is_long_to_count_is_counted_rarely() -> None:
    tables = Tables()
    demands = FleetDemand(table=tables, durations=tables, clock=tables.clock)
    for cost_s, fresh_s in ((0.0, 1.0), (3.0, 60.0)):
        tables.clock.now_s, tables.cost_s, tables.counts = tables.clock.now_s + 1000, cost_s, 0
        demand, age_s = await demands.demand(DemandQuery())
        assert (demand.queued, age_s) == (3, cost_s)
        assert math.isclose(demand.predicted_work_s, 3 * 2.0, rel_tol=0.02), (
            "a type of no sample takes the project's mean"
        )
        for _ in range(5):
            tables.clock.now_s += fresh_s / 5 - 0.01
            await demands.demand(DemandQuery())
        assert tables.counts == 1
        tables.clock.now_s += 0.1
        await demands.demand(DemandQuery())
        assert tables.counts == 2


async def test_a_forecast_wants_runners_earlier_and_never_fewer() -> None:
    tables = Tables()
    demands = FleetDemand(table=tables, durations=tables, clock=tables.clock)
    query = DemandQuery(target_drain_s=1, slots_per_runner=1, default_duration_s=100, forecast_s=120)
    plain, _ = await demands.demand(DemandQuery(target_drain_s=1, slots_per_runner=1))
    first, _ = await demands.demand(query)
    assert (first.forecast_slots, first.errors, first.slots) == (None, None, plain.slots)
    for queued in range(1, 100):
        demands.sample(census(work(10 * queued)))
    later, _ = await demands.demand(query)
    assert later.errors is not None
    assert later.errors.forecast < later.errors.naive
    assert later.forecast_slots is not None
    # After 990, 80 more come until then.
    assert 1040 < later.forecast_slots <= 1071
    assert later.slots == later.runners == later.forecast_slots
    assert (await demands.demand(replace(query, max_runners=7)))[0].runners == 7
    for queued in range(99, 0, -1):
        demands.sample(census(work(10 * queued)))
    falling, _ = await demands.demand(query)
    assert falling.slots == plain.slots


async def test_the_forecasts_of_other_queries_are_forgotten() -> None:
    tables = Tables()
    demands = FleetDemand(table=tables, durations=tables, clock=tables.clock)
    for number in range(MAX_FORECASTS + 10):
        await demands.demand(DemandQuery(forecast_s=60, labels=frozenset({f"a={number}"})))
    assert len(demands._forecasts) == MAX_FORECASTS
