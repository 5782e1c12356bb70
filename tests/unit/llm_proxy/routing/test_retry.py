"""Whether, when and where a call is tried again."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.routing.retry import (
    MAX_RETRY_AFTER_S,
    Failed,
    NextTry,
    Recovery,
    RetryBudget,
    RetryPolicy,
    retry_after_s,
)
from tests.support.clock import Clock
from tests.support.llm_proxy.places import new_states

NOW_S = 1_700_000_000.0


def recovery(routes: int = 1, *, deadline_s: float = 30, draw: float = 0.5) -> Recovery:
    policy = RetryPolicy(deadline_s=deadline_s, first_delay_s=0.1, max_delay_s=0.8)
    return Recovery(routes=routes, policy=policy, random=lambda: draw)


def test_another_replica_follows_at_once_where_the_backend_never_saw_the_call() -> None:
    plan = recovery()
    assert plan.after(Failed(backend_id="a", replicas="abc", at_once=True), elapsed_s=0) == NextTry(
        route=0, avoid=frozenset("a")
    )
    assert plan.after(Failed(backend_id="c", replicas="abc", at_once=True), elapsed_s=0) == NextTry(
        route=0, avoid=frozenset("ac")
    )
    again = plan.after(Failed(backend_id="b", replicas="abc", at_once=True), elapsed_s=0)
    assert again == NextTry(route=0, avoid=frozenset("b"), wait_s=pytest.approx(0.1))


def test_a_refusal_is_followed_by_a_wait_and_its_retry_after_holds_for_its_backend_only() -> None:
    refused = Failed(backend_id="a", replicas="ab", retry_after_s=9)
    assert recovery().after(refused, elapsed_s=0) == NextTry(route=0, avoid=frozenset("a"), wait_s=pytest.approx(0.1))
    alone = Failed(backend_id="a", replicas="a", retry_after_s=9)
    assert recovery().after(alone, elapsed_s=0) == NextTry(route=0, avoid=frozenset("a"), wait_s=9)
    assert recovery(deadline_s=8).after(alone, elapsed_s=0) is None


def test_fallbacks_come_in_order_once_every_replica_was_tried_and_then_all_again() -> None:
    plan = recovery(routes=3)
    first = plan.after(Failed(backend_id="a", replicas="ab", at_once=True), elapsed_s=0)
    routes = [first.route] if first else []
    for backend_id, replicas in (("b", "ab"), ("x", "x"), ("y", "y"), ("a", "ab")):
        step = plan.after(Failed(backend_id=backend_id, replicas=replicas, at_once=True), elapsed_s=0)
        assert step is not None
        routes.append(step.route)
        assert (step.wait_s > 0) == (backend_id == "y")
    assert routes == [0, 1, 2, 0, 0]


@pytest.mark.parametrize("routes", [1, 2])
def test_what_cannot_get_better_is_tried_elsewhere_or_nowhere(routes: int) -> None:
    step = recovery(routes).after(Failed(backend_id="a", replicas="a", again=False), elapsed_s=0)
    assert step == (None if routes == 1 else NextTry(route=1))


def test_a_caller_that_states_its_patience_is_kept_no_longer_and_any_other_ten_seconds() -> None:
    policy = RetryPolicy(deadline_s=30)
    assert [policy.within(left_s).deadline_s for left_s in (None, 20, 100, 0, -3)] == [10, 18, 30, 0, 0]
    assert RetryPolicy(deadline_s=3).within(None).deadline_s == 3
    assert RetryPolicy(deadline_s=0).within(600).deadline_s == 0


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_call_that_may_be_at_fault_is_tried_twice_at_each_backend_at_most(routes: int, replicas: int) -> None:
    plan, tried = recovery(routes), Counter({"0a": 1})
    step = NextTry(route=0)
    backend_id = "0a"
    while True:
        names = [f"{step.route}{name}" for name in "abcd"[:replicas]]
        failed = Failed(backend_id=backend_id, replicas=names, own_fault=True)
        following = plan.after(failed, elapsed_s=0)
        if following is None:
            break
        step = following
        names = [f"{step.route}{name}" for name in "abcd"[:replicas]]
        backend_id = next((name for name in names if name not in step.avoid), names[0])
        tried[backend_id] += 1
    assert set(tried) == {f"{route}{name}" for route in range(routes) for name in "abcd"[:replicas]}
    assert max(tried.values()) <= 2


def test_a_deadline_of_zero_never_tries_again() -> None:
    assert recovery(3, deadline_s=0).after(Failed(backend_id="a", replicas="ab", at_once=True), elapsed_s=0) is None


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 40)), max_size=60),
    st.floats(0, 1),
)
def test_no_try_begins_past_the_deadline_and_rounds_are_apart(
    routes: int, replicas: int, outcomes: list[tuple[bool, bool, float]], draw: float
) -> None:
    plan, elapsed_s, route = recovery(routes, draw=draw), 0.0, 0
    at_once = 0
    names = "abcd"[:replicas]
    avoided: frozenset[str] = frozenset()
    for soon, again, wait_s in outcomes:
        backend_id = next((name for name in names if name not in avoided), names[0])
        failed = Failed(
            backend_id=f"{route}{backend_id}",
            replicas=[f"{route}{name}" for name in names],
            at_once=soon,
            again=again,
            retry_after_s=wait_s,
        )
        step = plan.after(failed, elapsed_s=elapsed_s)
        if step is None:
            return
        elapsed_s += step.wait_s
        assert elapsed_s <= 30
        assert 0 <= step.route < routes
        at_once = 0 if step.wait_s else at_once + 1
        assert at_once < routes * replicas, "a whole round without a wait"
        route, avoided = step.route, frozenset(name[1:] for name in step.avoid)


calls_and_seconds = st.lists(st.tuples(st.integers(0, 50), st.floats(0, 2), st.integers(0, 30)), max_size=40)


@given(calls_and_seconds)
def test_further_tries_are_a_share_of_the_calls_and_a_few_per_second(steps: list[tuple[int, float, int]]) -> None:
    clock = Clock()
    budget = RetryBudget(clock=clock)
    start_s, calls, taken = clock.now_s, 0, 0
    for more, seconds, wanted in steps:
        calls += more
        clock.now_s += seconds
        for _ in range(wanted):
            if budget.take(calls):
                taken += 1
                calls += 1
        most = 10 + 10 * (clock.now_s - start_s) + 0.2 * calls
        assert taken <= most + 1e-6


def test_a_spent_budget_is_refilled_by_time_and_by_recovery() -> None:
    clock = Clock()
    budget = RetryBudget(clock=clock)
    while budget.take(0):
        pass
    clock.now_s += 1
    assert sum(budget.take(0) for _ in range(100)) == 10
    budget.waiting = 500
    budget.release()
    assert sum(budget.take(0) for _ in range(1000)) == 500


def test_a_backend_that_is_back_lets_all_go_that_wait() -> None:
    clock = Clock()
    state = new_states(clock).of("a")
    while state.budget.take(0):
        pass
    state.budget.waiting = 50
    for _ in range(3):
        state.failed(state.begin(), "connect")
    for _ in range(2):
        assert not state.budget.take(0)
        state.answered(state.begin())
    assert state.budget.take(0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", 0.0),
        ("0", 0.0),
        (" 7 ", 7.0),
        ("3600", MAX_RETRY_AFTER_S),
        ("9" * 400, MAX_RETRY_AFTER_S),
        ("-1", 0.0),
        ("1.5", 0.0),
        ("²", 0.0),
        ("soon", 0.0),
        ("Tue, 99 Foo 2023 00:00:00 GMT", 0.0),
        (format_datetime(datetime.fromtimestamp(NOW_S, UTC) + timedelta(seconds=5), usegmt=True), 5.0),
        (format_datetime(datetime.fromtimestamp(NOW_S, UTC) - timedelta(days=5), usegmt=True), 0.0),
        (format_datetime(datetime.fromtimestamp(NOW_S, UTC) + timedelta(days=5), usegmt=True), MAX_RETRY_AFTER_S),
    ],
)
def test_retry_after_is_read_in_seconds_and_as_a_date_and_bounded(value: str, expected: float) -> None:
    assert retry_after_s(value, NOW_S) == pytest.approx(expected, abs=0.01)


@given(st.text(max_size=40))
def test_whatever_retry_after_holds_it_is_a_bounded_wait(value: str) -> None:
    assert 0 <= retry_after_s(value, NOW_S) <= MAX_RETRY_AFTER_S
