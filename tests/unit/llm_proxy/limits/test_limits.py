"""Limits hold in every minute, tell truly when to come back, and every reservation comes back once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.errors import ModelLimitExceeded, TokenBudgetExceeded
from fulmen_llm_proxy.limits.limiter import (
    KEEP_SLOTS,
    CallLimiter,
    CallLimits,
    ProjectLimits,
    Reservation,
    Window,
)
from fulmen_llm_proxy.limits.sliding_count import SLOT_S, SLOTS, SlidingCount
from tests.support.clock import Clock

P = "projects/p"
BEGIN_S = 1_000_000 * SLOT_S


def limiter_of(
    clock: Clock | None = None, *, budget: int = 0, attempt: CallLimits | None = None, **project: int
) -> Any:
    made = CallLimiter(clock=clock or Clock(BEGIN_S))
    limits = ProjectLimits(project=CallLimits(**project), attempt=attempt or CallLimits(), attempt_token_budget=budget)
    made.set_projects({P: limits})
    return made


def admit(limiter: CallLimiter, *, attempt: str = "a", tokens: int = 0, budget: int = 0) -> Reservation:
    return limiter.admit(P, attempt=attempt, budget=budget, tokens=tokens)


def refusal(limiter: CallLimiter, **call: Any) -> ModelLimitExceeded:
    with pytest.raises(ModelLimitExceeded) as refused:
        admit(limiter, **call)
    return refused.value


def test_a_project_without_limits_is_not_limited() -> None:
    limiter = limiter_of(requests_per_minute=1)
    assert not limiter.is_unlimited(P, 0)
    assert limiter.is_unlimited("projects/other", 0)
    assert not limiter.is_unlimited("projects/other", 1)


def test_a_refusal_names_the_limit_its_owner_its_size_and_when_there_is_room() -> None:
    clock = Clock(BEGIN_S)
    limiter = limiter_of(clock, requests_per_minute=2)
    admit(limiter)
    clock.now_s += 10
    admit(limiter)
    refused = refusal(limiter)
    assert refused.metadata == {"limit": "requests_per_minute", "of": P, "size": "2"}
    assert "requests_per_minute of projects/p exceeded (2)" in str(refused)
    assert refused.retry_after_s is not None
    clock.now_s += refused.retry_after_s - 0.01
    refusal(limiter)
    clock.now_s += 0.01
    admit(limiter)


def test_tokens_are_reserved_at_the_begin_and_settled_at_the_end() -> None:
    limiter = limiter_of(tokens_per_minute=100)
    first = admit(limiter, tokens=80)
    assert refusal(limiter, tokens=30).metadata["limit"] == "tokens_per_minute"
    limiter.settle(first, 10)
    second = admit(limiter, tokens=90)
    refusal(limiter, tokens=1)
    limiter.settle(second, 95)
    refusal(limiter, tokens=1)


def test_a_call_that_reserves_more_than_the_limit_runs_alone() -> None:
    clock = Clock(BEGIN_S)
    limiter = limiter_of(clock, tokens_per_minute=100)
    limiter.settle(admit(limiter, tokens=5), 5)
    refused = refusal(limiter, tokens=10_000)
    clock.now_s += refused.retry_after_s or 0
    limiter.settle(admit(limiter, tokens=10_000), 20)
    limiter.settle(admit(limiter, tokens=80), 80)


def test_calls_at_once_are_bounded_and_each_end_makes_room() -> None:
    limiter = limiter_of(attempt=CallLimits(concurrent_calls=2))
    holds = [admit(limiter), admit(limiter)]
    assert refusal(limiter).metadata["of"] == "a"
    admit(limiter, attempt="b")
    limiter.settle(holds[0], 0)
    admit(limiter)


def test_a_refusal_of_one_limit_takes_nothing_of_another() -> None:
    limiter = limiter_of(requests_per_minute=2, attempt=CallLimits(concurrent_calls=1))
    admit(limiter)
    for _ in range(5):
        assert refusal(limiter).metadata["limit"] == "concurrent_calls"
    admit(limiter, attempt="b")
    assert refusal(limiter, attempt="c").metadata["limit"] == "requests_per_minute"


def test_a_spent_budget_is_final_and_one_that_is_only_reserved_is_not() -> None:
    limiter = limiter_of(budget=100)
    hold = admit(limiter, tokens=100)
    assert refusal(limiter).metadata["limit"] == "attempt_token_budget"
    limiter.settle(hold, 60)
    limiter.settle(admit(limiter, tokens=100), 40)
    with pytest.raises(TokenBudgetExceeded) as spent:
        admit(limiter)
    assert spent.value.metadata == {"attempt": "a", "budget": "100", "used": "100"}
    admit(limiter, attempt="b")


def test_the_budget_of_the_key_goes_before_that_of_the_project() -> None:
    limiter = limiter_of(budget=10)
    limiter.settle(admit(limiter, budget=1000), 500)
    admit(limiter, budget=1000)
    unlimited = CallLimiter(clock=Clock(BEGIN_S))
    unlimited.settle(admit(unlimited, budget=10), 10)
    with pytest.raises(TokenBudgetExceeded):
        admit(unlimited, budget=10)


def test_what_the_store_knows_of_an_attempt_counts_with_what_it_was_not_told_yet() -> None:
    limiter = limiter_of(budget=100)
    key = (P, "", "a")
    limiter.settle(admit(limiter), 30)
    limiter.apply_stored({key: 30}, {key: 70})
    limiter.settle(admit(limiter), 20)
    limiter.apply_stored({}, {key: 70})
    hold = admit(limiter)
    limiter.settle(hold, 10)
    with pytest.raises(TokenBudgetExceeded):
        admit(limiter)
    # The store does not know the attempt: what it was told is remembered here.
    unknown = limiter_of(budget=100)
    unknown.settle(admit(unknown), 100)
    unknown.apply_stored({key: 100}, {})
    with pytest.raises(TokenBudgetExceeded):
        admit(unknown)


def test_what_others_use_counts_until_it_is_a_minute_old() -> None:
    clock = Clock(BEGIN_S)
    limiter = limiter_of(clock, requests_per_minute=10, concurrent_calls=5)
    slot = int(clock() // SLOT_S)
    limiter.apply_remote(slot, [Window(key=(P, "", ""), requests=[4, 0, 5], tokens=[], in_flight=4, reserved=0)])
    hold = admit(limiter)
    assert refusal(limiter).metadata["limit"] == "concurrent_calls"
    limiter.settle(hold, 0)
    refused = refusal(limiter)
    assert refused.metadata["limit"] == "requests_per_minute"
    limiter.apply_remote(slot, [])
    clock.now_s += refused.retry_after_s or 0
    for _ in range(5):
        admit(limiter)
    refusal(limiter)


def test_idle_accounts_are_forgotten_and_those_with_calls_are_not() -> None:
    clock = Clock(BEGIN_S)
    limiter = limiter_of(clock, budget=100)
    hold = admit(limiter, attempt="long", tokens=5)
    for number in range(50):
        limiter.settle(admit(limiter, attempt=f"a{number}"), 0)
    clock.now_s += (SLOTS + 2) * SLOT_S
    _, windows = limiter.windows()
    assert [(window.key[2], window.in_flight, window.reserved) for window in windows] == [("long", 1, 5)]
    assert len(limiter._states) == 51
    clock.now_s += KEEP_SLOTS * SLOT_S
    limiter.windows()
    assert len(limiter._states) == 1
    limiter.settle(hold, 3)


def test_a_clock_that_is_set_back_shuts_nobody_out() -> None:
    clock = Clock(BEGIN_S)
    limiter = limiter_of(clock, requests_per_minute=1)
    hold = admit(limiter)
    clock.now_s -= 7200
    limiter.forget_minute()
    limiter.settle(hold, 5)
    limiter.settle(admit(limiter), 5)


@dataclass
class Reference:
    """Every call with its time; what a limiter must not exceed is counted by looking at all of them."""

    requests: list[float] = field(default_factory=list)

    def in_last_minute(self, now_s: float) -> int:
        return sum(1 for began in self.requests if now_s - 60 < began <= now_s)

    def in_whole_slots(self, now_s: float) -> int:
        oldest = (math.floor(now_s / SLOT_S) - SLOTS + 1) * SLOT_S
        return sum(1 for began in self.requests if began >= oldest)


@settings(deadline=None)
@given(
    limit=st.integers(1, 12),
    waits=st.lists(st.floats(0, 25, allow_nan=False), min_size=1, max_size=120),
)
def test_no_minute_ever_holds_more_calls_than_the_limit_and_none_is_refused_without_need(
    limit: int, waits: list[float]
) -> None:
    clock, reference = Clock(BEGIN_S), Reference()
    limiter = limiter_of(clock, requests_per_minute=limit)
    for wait_s in waits:
        clock.now_s += wait_s
        has_room = reference.in_whole_slots(clock.now_s) < limit
        if has_room:
            admit(limiter)
            reference.requests.append(clock.now_s)
        else:
            assert 0 < (refusal(limiter).retry_after_s or 0) <= SLOTS * SLOT_S
        assert reference.in_last_minute(clock.now_s) <= limit


@settings(deadline=None)
@given(
    limit=st.integers(50, 500),
    calls=st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 200), st.integers(0, 300), st.integers(0, 8)), max_size=80
    ),
)
def test_tokens_of_a_minute_pass_the_limit_by_no_more_than_was_used_beyond_reservations(
    limit: int, calls: list[tuple[float, int, int, int]]
) -> None:
    clock = Clock(BEGIN_S)
    limiter = limiter_of(clock, tokens_per_minute=limit)
    running: list[tuple[Reservation, int, int, float]] = []
    ended: list[tuple[float, int]] = []
    beyond = 0
    for wait_s, reserved, used, ends in calls:
        clock.now_s += wait_s
        for _ in range(min(ends, len(running))):
            hold, kept, spent, began = running.pop(0)
            limiter.settle(hold, spent)
            ended.append((began, spent))
            beyond += max(0, spent - kept)
        try:
            hold = admit(limiter, tokens=reserved)
        except ModelLimitExceeded:
            pass
        else:
            running.append((hold, min(reserved, limit), used, clock.now_s))
        recent = sum(spent for began, spent in ended if began > clock.now_s - 60)
        assert recent <= limit + beyond
    for hold, *_ in running:
        limiter.settle(hold, 0)
    _, windows = limiter.windows()
    assert all(window.in_flight == 0 and window.reserved == 0 for window in windows)
    assert all(count >= 0 for window in windows for count in window.tokens)


@given(counts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=60), skip=st.integers(0, 30))
def test_a_count_that_was_told_is_the_same_elsewhere(counts: list[tuple[int, int]], skip: int) -> None:
    mine, told, slot = SlidingCount(), SlidingCount(), 500
    for step, count in counts:
        slot += step
        mine.add(slot, count)
    recent = mine.recent(slot)
    assert len(recent) <= SLOTS
    told.replace(slot, recent)
    slot += skip
    assert told.total(slot) == mine.total(slot)
    assert sum(told.recent(slot)) == told.total(slot)
