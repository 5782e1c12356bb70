"""The ready queue: order, ageing, fairness, labels, groups."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.ids import uuid7
from fulmen_store.scheduling.fair_queue import FairQueue, ReadyItem, waits_since
from fulmen_store.scheduling.rules import QueueRules, QueueTerms
from tests.support.store.manual_clock import ManualClock
from tests.support.store.scheduling import ready_item

NO_AGEING = QueueRules(ageing_interval_s=0)
INTERVAL_S = 60.0


def aged(clock: ManualClock, age_s: float, **fields: int) -> ReadyItem:
    return ready_item(since_s=clock.now_s - age_s, **fields)


def queue_with(clock: ManualClock | None = None, **terms: QueueTerms) -> FairQueue:
    queue = FairQueue(clock=clock) if clock is not None else FairQueue()
    for name, each in terms.items():
        queue.learn(int(name.removeprefix("p")), each)
    return queue


def popped(queue: FairQueue, count: int) -> list[ReadyItem]:
    found = [queue.pop() for _ in range(count)]
    return [one for one in found if one is not None]


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=2, max_size=5),
    ages_s=st.lists(st.floats(0, 100_000), min_size=5, max_size=5),
    warm_up=st.integers(0, 50),
    window=st.integers(1, 120),
)
def test_over_any_window_backlogged_projects_get_their_weights(
    weights: list[int], ages_s: list[float], warm_up: int, window: int
) -> None:
    """However old each project's backlog is: age does not buy a share."""
    clock = ManualClock(1_800_000_000.0)
    queue = FairQueue(clock=clock)
    for project_id, weight in enumerate(weights):
        queue.learn(project_id, QueueTerms(weight=weight))
        for _ in range(warm_up + window):
            queue.push(aged(clock, ages_s[project_id], project_id=project_id))
    popped(queue, warm_up)
    counts = Counter(one.project_id for one in popped(queue, window))
    for project_id, weight in enumerate(weights):
        # Stride scheduling: the error of each project is below one turn of all, whatever the window.
        share = window * weight / sum(weights)
        assert abs(counts[project_id] - share) <= len(weights)


def test_a_project_may_ask_that_its_weight_does_not_count() -> None:
    plain = QueueTerms(weight=900, rules=QueueRules(weighted_share=False))
    queue = queue_with(p1=plain, p2=QueueTerms(weight=100))
    for _ in range(50):
        queue.push(ready_item(1))
        queue.push(ready_item(2))
    assert Counter(one.project_id for one in popped(queue, 40)) == {1: 20, 2: 20}


def test_a_newcomer_does_not_starve_those_who_were_there() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(ready_item(1))
    queue.push(ready_item(3))
    popped(queue, 50)
    for _ in range(50):
        queue.push(ready_item(2))
    assert Counter(one.project_id for one in popped(queue, 10)) == {1: 5, 2: 5}


def test_a_project_that_comes_back_neither_lags_nor_owes() -> None:
    queue = FairQueue()
    for _ in range(60):
        queue.push(ready_item(1))
        queue.push(ready_item(2))
    popped(queue, 20)
    away = ready_item(3)
    queue.push(away)
    popped(queue, 40)
    for _ in range(30):
        queue.push(ready_item(3))
    assert Counter(one.project_id for one in popped(queue, 30)) == {1: 10, 2: 10, 3: 10}


def test_the_lowest_rank_goes_first_and_the_oldest_within_it() -> None:
    queue = queue_with(p1=QueueTerms(rules=NO_AGEING))
    old, new, urgent = ready_item(), ready_item(), ready_item(sort_priority=-3)
    for one in (new, urgent, old):
        queue.push(one)
    assert popped(queue, 3) == [urgent, *sorted([old, new], key=lambda one: one.rollout_id.int)]
    assert queue.pop() is None


@given(
    rows=st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 500)), min_size=1, max_size=20),
    interval_s=st.sampled_from([1.0, 60.0, 300.0]),
)
def test_within_a_project_an_interval_of_waiting_is_worth_one_priority(
    rows: list[tuple[int, float]], interval_s: float
) -> None:
    clock = ManualClock(1_800_000_000.0)
    queue = queue_with(clock, p1=QueueTerms(rules=QueueRules(ageing_interval_s=interval_s)))
    items = [aged(clock, age_s, sort_priority=sort_priority) for sort_priority, age_s in rows]
    for one in items:
        queue.push(one)

    def worth(one: ReadyItem) -> float:
        return one.sort_priority - (clock.now_s - one.waiting_since_s) / interval_s

    order = [worth(one) for one in popped(queue, len(items))]
    assert order == sorted(order)


@settings(deadline=None)
@given(interval_s=st.sampled_from([10.0, 60.0]), sort_priority=st.integers(1, 30), steps=st.integers(1, 4))
def test_with_ageing_nothing_starves_behind_an_endless_stream_of_urgent_work(
    interval_s: float, sort_priority: int, steps: int
) -> None:
    """Within the project and from another one alike."""
    clock = ManualClock(1_800_000_000.0)
    rules = QueueRules(ageing_interval_s=interval_s)
    queue = queue_with(clock, p1=QueueTerms(rules=rules), p2=QueueTerms(rules=rules))
    meek = [aged(clock, 0, project_id=project_id, sort_priority=sort_priority) for project_id in (1, 2)]
    for one in meek:
        queue.push(one)
    seen: list[ReadyItem] = []
    rounds = (sort_priority + 1) * steps + 2
    for _ in range(rounds):
        for _ in range(3):
            queue.push(aged(clock, 0, project_id=1))
        seen += popped(queue, 3)
        clock.now_s += interval_s / steps
    assert {one.rollout_id for one in meek} <= {one.rollout_id for one in seen}


def test_without_ageing_urgent_work_goes_first_for_ever() -> None:
    clock = ManualClock(1_800_000_000.0)
    off = QueueTerms(rules=NO_AGEING)
    queue = queue_with(clock, p1=off, p2=off)
    meek = aged(clock, 10_000_000, project_id=2, sort_priority=1)
    queue.push(meek)
    for _ in range(20):
        queue.push(aged(clock, 0))
        one = queue.pop()
        assert one is not None
        assert one.project_id == 1
    assert queue.pop() == meek


def test_new_terms_count_for_what_waits_already() -> None:
    clock = ManualClock(1_800_000_000.0)
    queue = queue_with(clock, p1=QueueTerms(rules=NO_AGEING))
    old, urgent = aged(clock, 500, sort_priority=1), aged(clock, 0)
    queue.push(old)
    queue.push(urgent)
    queue.learn(1, QueueTerms(rules=QueueRules(ageing_interval_s=INTERVAL_S)))
    assert popped(queue, 2) == [old, urgent]
    assert (len(queue), queue.count_of(1)) == (0, 0)


def test_age_counts_from_the_time_before_which_it_must_not_run() -> None:
    rollout_id = uuid7()
    created_s = (rollout_id.int >> 80) / 1000
    assert waits_since(rollout_id, None) is None
    assert waits_since(rollout_id, created_s + 1) is None
    assert waits_since(rollout_id, created_s + 3600) == created_s + 3600
    assert ReadyItem(rollout_id=rollout_id, project_id=1).waiting_since_s == created_s


def test_a_runner_gets_only_what_its_labels_and_projects_allow() -> None:
    queue = FairQueue()
    gpu, plain = ready_item(labels=frozenset({"gpu=h200"})), ready_item(2)
    queue.push(gpu)
    queue.push(plain)
    assert queue.pop(frozenset({"zone=a"}), projects={1}) is None
    assert queue.count_by_labels(1) == {gpu.labels: 1}
    assert queue.pop(frozenset({"zone=a"})) == plain
    assert queue.pop(frozenset({"gpu=h200", "zone=a"})) == gpu
    assert len(queue) == 0


def test_a_project_that_does_not_match_labels_runs_anywhere() -> None:
    queue = queue_with(p1=QueueTerms(rules=QueueRules(match_labels=False)))
    gpu = ready_item(labels=frozenset({"gpu=h200"}))
    queue.push(gpu)
    assert queue.pop(frozenset()) == gpu


def test_urgent_work_that_a_runner_cannot_take_does_not_change_who_is_served() -> None:
    """A rollout without a runner must not make the projects' shares depend on their age."""
    clock = ManualClock(1_800_000_000.0)
    queue = FairQueue(clock=clock)
    queue.push(ready_item(3, sort_priority=-50, labels=frozenset({"gpu=h200"})))
    for _ in range(30):
        queue.push(aged(clock, 10_000, project_id=1))
        queue.push(aged(clock, 0, project_id=2))
    assert Counter(one.project_id for one in popped(queue, 20)) == {1: 10, 2: 10}


@pytest.mark.parametrize("longest_first", [True, False])
def test_within_a_group_the_longest_goes_first_and_the_groups_keep_their_places(longest_first: bool) -> None:
    predicted = {1: 5.0, 2: 60.0, None: 0.0}
    queue = FairQueue(predicted_s=lambda task_type: predicted[task_type])
    queue.learn(1, QueueTerms(rules=QueueRules(longest_first=longest_first)))

    def member(group: int | None, task_type: int | None) -> ReadyItem:
        return ready_item(group_key=UUID(int=group) if group is not None else None, task_type=task_type)

    first = [member(7, 1), member(7, None), member(7, 2), member(7, 1)]
    between = member(None, 2)
    second = [member(8, 1), member(8, 2)]
    for one in sorted([*first, between, *second], key=lambda one: one.rollout_id.int):
        queue.push(one)
    order = popped(queue, 7)
    if longest_first:
        assert order == [first[2], first[0], first[3], first[1], between, second[1], second[0]]
    else:
        assert order == [*first, between, *second]


def test_a_project_without_room_is_passed_over_until_it_has_some() -> None:
    queue = FairQueue()
    held, other = ready_item(1), ready_item(2)
    queue.push(held)
    queue.push(other)
    queue.allow(1, 0)
    assert popped(queue, 2) == [other]
    assert queue.allow_more(1, 1)
    assert not queue.allow_more(2, 1)
    assert queue.pop() == held


def test_a_limited_project_hands_out_what_it_is_allowed_until_its_terms_change() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(ready_item(1))
    queue.allow(1, 2)
    assert len(popped(queue, 5)) == 2
    queue.allow_at_least(3)
    assert len(popped(queue, 5)) == 3
    queue.learn(1, QueueTerms(max_running=9))
    assert len(popped(queue, 9)) == 5


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(-1, 1), st.booleans(), st.integers(0, 2), st.integers(0, 2)),
        max_size=60,
    )
)
def test_everything_that_goes_in_comes_out_once(moves: list[tuple[int, int, bool, int, int]]) -> None:
    queue, pushed, taken = FairQueue(predicted_s=lambda task_type: float(task_type or 0)), [], []
    for project_id, sort_priority, take, group, task_type in moves:
        if take and (one := queue.pop()) is not None:
            taken.append(one)
        key = UUID(int=group) if group else None
        fresh = ready_item(project_id, sort_priority=sort_priority, group_key=key, task_type=task_type or None)
        pushed.append(fresh)
        queue.push(fresh)
        queue.push(fresh)
    while (one := queue.pop()) is not None:
        taken.append(one)
    assert sorted(one.rollout_id for one in taken) == sorted(one.rollout_id for one in pushed)
    assert all(queue.count_of(project_id) == 0 for project_id in (1, 2, 3))
