"""The ready queue: order, fairness, labels."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fulmen.ids import uuid7
from fulmen_store.domain.fair_queue import FairQueue, ReadyItem


def item(project_id: int = 1, rank: int = 0, labels: frozenset[str] = frozenset()) -> ReadyItem:
    return ReadyItem(rollout_id=uuid7(), project_id=project_id, rank=rank, labels=labels)


@given(
    weights=st.lists(st.integers(1, 10), min_size=2, max_size=5),
    warm_up=st.integers(0, 50),
    window=st.integers(1, 120),
)
def test_over_any_window_backlogged_projects_get_their_weights(weights: list[int], warm_up: int, window: int) -> None:
    queue = FairQueue(lambda project_id: weights[project_id])
    for project_id in range(len(weights)):
        for _ in range(warm_up + window):
            queue.push(item(project_id))
    for _ in range(warm_up):
        queue.pop()
    counts: Counter[int] = Counter()
    for _ in range(window):
        popped = queue.pop()
        assert popped is not None
        counts[popped.project_id] += 1
    for project_id, weight in enumerate(weights):
        # Stride scheduling: the error of each project is below one turn of all, whatever the window.
        share = window * weight / sum(weights)
        assert abs(counts[project_id] - share) <= len(weights)


def test_a_newcomer_does_not_starve_those_who_were_there() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(item(1))
    for _ in range(50):
        queue.pop()
    for _ in range(50):
        queue.push(item(2))
    first_ten = [popped.project_id for popped in (queue.pop() for _ in range(10)) if popped]
    assert Counter(first_ten) == {1: 5, 2: 5}


def test_the_lowest_rank_goes_first_and_the_oldest_within_it() -> None:
    queue = FairQueue()
    old, new, urgent = item(), item(), item(rank=-3)
    for one in (new, urgent, old):
        queue.push(one)
    order = [queue.pop() for _ in range(3)]
    assert order == [urgent, *sorted([old, new], key=lambda one: one.rollout_id.int)]
    assert queue.pop() is None


def test_a_runner_gets_only_what_its_labels_and_projects_allow() -> None:
    queue = FairQueue()
    gpu, plain = item(labels=frozenset({"gpu=h200"})), item(2)
    queue.push(gpu)
    queue.push(plain)
    assert queue.pop(frozenset({"zone=a"}), projects={1}) is None
    assert queue.pop(frozenset({"zone=a"})) == plain
    assert queue.pop(frozenset({"gpu=h200", "zone=a"})) == gpu
    assert len(queue) == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 1), st.booleans()), max_size=60))
def test_everything_that_goes_in_comes_out_once(moves: list[tuple[int, int, bool]]) -> None:
    queue, pushed, popped = FairQueue(), [], []
    for project_id, rank, take in moves:
        if take and (one := queue.pop()) is not None:
            popped.append(one)
        fresh = item(project_id, rank)
        pushed.append(fresh)
        queue.push(fresh)
        queue.push(fresh)
    while (one := queue.pop()) is not None:
        popped.append(one)
    assert sorted(one.rollout_id for one in popped) == sorted(one.rollout_id for one in pushed)
    assert all(queue.count_of(project_id) == 0 for project_id in (1, 2, 3))
