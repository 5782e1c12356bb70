"""The circuit breaker, as a state machine and rule by rule."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fulmen_llm_proxy.routing.breaker import FAILURES_IN_ROW, SUCCESSES_TO_CLOSE, TRIALS, Breaker, BreakerState
from tests.support.clock import Clock

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
RECHECK_S = 2.0


def broken(clock: Clock) -> Breaker:
    breaker = Breaker(clock=clock, recheck_s=RECHECK_S)
    for _ in range(FAILURES_IN_ROW):
        assert breaker.state is CLOSED
        breaker.failed(breaker.begin())
    assert breaker.state is OPEN
    return breaker


def test_it_opens_at_failures_in_a_row_and_lets_a_few_calls_through_later() -> None:
    clock = Clock()
    breaker = broken(clock)
    assert not breaker.admits
    clock.now_s += RECHECK_S
    periods = []
    while breaker.admits:
        periods.append(breaker.begin())
    assert (len(periods), breaker.state) == (TRIALS, HALF_OPEN)
    breaker.abandoned(periods.pop())
    assert breaker.admits
    assert not breaker.succeeded(periods.pop())
    assert breaker.succeeded(periods.pop())
    assert breaker.state is CLOSED


def test_it_opens_at_half_of_the_last_sixteen_calls() -> None:
    breaker = Breaker(clock=Clock(), recheck_s=RECHECK_S)
    for number in range(15):
        assert breaker.state is CLOSED
        (breaker.succeeded if number % 2 else breaker.failed)(breaker.begin())
    assert breaker.state is OPEN


def test_each_trial_that_fails_doubles_the_wait_up_to_sixteen_times() -> None:
    clock = Clock()
    breaker = broken(clock)
    waited = []
    for _ in range(6):
        before = clock.now_s
        while not breaker.admits:
            clock.now_s += RECHECK_S
        waited.append((clock.now_s - before) / RECHECK_S)
        breaker.failed(breaker.begin())
    assert waited == [1, 2, 4, 8, 16, 16]


def test_of_a_probed_backend_the_probes_decide() -> None:
    clock = Clock()
    breaker = broken(clock)
    breaker.probe_failed()
    clock.now_s += 1000
    assert breaker.state is OPEN
    breaker.probe_succeeded()
    assert breaker.state is HALF_OPEN
    for _ in range(SUCCESSES_TO_CLOSE):
        breaker.succeeded(breaker.begin())
    for _ in range(FAILURES_IN_ROW):
        assert breaker.state is CLOSED
        breaker.probe_failed()
    assert breaker.state is OPEN


def test_failed_probes_do_not_count_while_calls_are_answered() -> None:
    breaker = Breaker(clock=Clock(), recheck_s=RECHECK_S)
    for _ in range(20):
        breaker.probe_failed()
        breaker.succeeded(breaker.begin())
    assert breaker.state is CLOSED


def test_the_last_backend_closes_its_breaker_by_answering_though_it_is_open() -> None:
    breaker = broken(Clock())
    breaker.probe_failed()
    assert [breaker.succeeded(breaker.begin()) for _ in range(SUCCESSES_TO_CLOSE)] == [False, True]


def test_what_began_before_it_opened_counts_no_more() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock, recheck_s=RECHECK_S)
    early = [breaker.begin() for _ in range(10)]
    for period in early:
        breaker.failed(period)
    clock.now_s += RECHECK_S
    assert breaker.state is HALF_OPEN
    for period in early:
        breaker.failed(period)
        breaker.succeeded(period)
        breaker.abandoned(period)
    assert breaker.state is HALF_OPEN


class BreakerMachine(RuleBasedStateMachine):
    """Calls begin and end in any order, time passes, probes come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(clock=self.clock, recheck_s=RECHECK_S)
        self.calls: list[tuple[int, BreakerState]] = []
        self.good_since_closed = 0

    @rule()
    def begin(self) -> None:
        if self.breaker.admits:
            state = self.breaker.state
            self.calls.append((self.breaker.begin(), state))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), how=st.sampled_from(["succeeded", "failed", "abandoned"]))
    def end(self, data: st.DataObject, how: str) -> None:
        period, began_in = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        before = self.breaker.state
        closed = getattr(self.breaker, how)(period)
        if how == "abandoned":
            assert self.breaker.state is before
        if closed:
            assert before is not CLOSED
            assert began_in is before
            assert self.breaker.state is CLOSED
        if self.breaker.state is OPEN and before is not OPEN:
            assert how == "failed"

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        before = self.breaker.state
        self.clock.now_s += seconds
        assert self.breaker.state is before or (before is OPEN and self.breaker.state is HALF_OPEN)
        assert self.breaker.state is before or not self.breaker.probed

    @rule(good=st.booleans())
    def probe(self, good: bool) -> None:
        before = self.breaker.state
        (self.breaker.probe_succeeded if good else self.breaker.probe_failed)()
        assert self.breaker.state is not CLOSED or before is CLOSED
        if good:
            assert self.breaker.state is not OPEN

    @invariant()
    def half_open_lets_few_through(self) -> None:
        trials = sum(period == self.breaker._period for period, _ in self.calls)
        if self.breaker.state is HALF_OPEN:
            assert trials <= TRIALS
            assert self.breaker.admits == (trials < TRIALS)
        else:
            assert self.breaker.admits == (self.breaker.state is CLOSED)


TestBreakerMachine = pytest.mark.filterwarnings("default")(BreakerMachine.TestCase)
TestBreakerMachine.settings = settings(stateful_step_count=60, deadline=None)
