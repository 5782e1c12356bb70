"""The books of a session: demand and reports, over any history."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fulmen_runner.attempts.outcome import Failed, FailureKind, Output, Reward, Succeeded
from fulmen_runner.attempts.session import (
    MAX_REPORT_MESSAGE_BYTES,
    MAX_REPORTS_PER_MESSAGE,
    AckStatus,
    LeaseSession,
    Report,
)
from tests.support.runner.assignments import assignment

SUCCESS = Succeeded(rewards=(Reward(value=1.0),))


class SessionMachine(RuleBasedStateMachine):
    """A store and a runner that talk through the books; streams break at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.session = LeaseSession(slots=4)
        self.session.opened("one")
        self.credits = 0
        self.in_flight: list[Report] = []
        self.stragglers = 0
        self.granted: set[str] = set()
        self.done: set[str] = set()

    @rule()
    def ask(self) -> None:
        self.credits += self.session.grant_credits(straggler_count=self.stragglers)

    @precondition(lambda self: self.credits)
    @rule()
    def assign(self) -> None:
        self.credits -= 1
        item = assignment()
        self.granted.add(item.attempt)
        started = self.session.assigned(item, now_unix_s=0.0)
        assert started is not self.session.draining

    @precondition(lambda self: self.session.running)
    @rule(released=st.booleans())
    def finish(self, released: bool) -> None:
        running = next(iter(self.session.running.values()))
        self.session.finished(running.assignment, None if released else SUCCESS)

    @rule()
    def send(self) -> None:
        self.in_flight += self.session.drain_reports(now_s=0.0)

    @precondition(lambda self: self.in_flight)
    @rule(status=st.sampled_from(list(AckStatus)))
    def answer(self, status: AckStatus) -> None:
        report = self.in_flight.pop(0)
        self.session.acknowledged(report.assignment.attempt, status, "because")
        if status is not AckStatus.INVALID or report.outcome is None:
            self.done.add(report.assignment.attempt)

    @rule()
    def break_stream(self) -> None:
        assert set(self.session.held_attempts()) == self.granted - self.done
        self.in_flight.clear()
        self.credits = 0
        self.session.opened("one")

    @rule()
    def begin_drain(self) -> None:
        self.session.draining = True

    @rule(slots=st.integers(1, 8))
    def change_slots(self, slots: int) -> None:
        self.session.set_slots(slots)

    @rule(count=st.integers(0, 2))
    def change_stragglers(self, count: int) -> None:
        self.stragglers = count

    @invariant()
    def never_asks_for_more_than_fits(self) -> None:
        granted = self.session.grant_credits(straggler_count=self.stragglers)
        self.credits += granted
        if granted:
            assert len(self.session.running) + self.credits + self.stragglers <= self.session.slots

    @invariant()
    def a_drain_asks_for_nothing(self) -> None:
        if self.session.draining:
            assert self.session.grant_credits(straggler_count=0) == 0


TestSession = SessionMachine.TestCase


def session_with(count: int, *, output: bytes = b"") -> LeaseSession:
    session = LeaseSession(slots=count)
    session.opened("one")
    outcome = Succeeded(rewards=(Reward(value=1.0),), output=Output(content=output, content_type="text/plain"))
    for _ in range(count):
        item = assignment()
        session.assigned(item, now_unix_s=0.0)
        session.finished(item, outcome)
    return session


def test_a_message_holds_a_limited_number_of_reports() -> None:
    session = session_with(MAX_REPORTS_PER_MESSAGE + 5)
    assert len(session.drain_reports(now_s=0.0)) <= MAX_REPORTS_PER_MESSAGE
    total = 0
    while batch := session.drain_reports(now_s=0.0):
        total += len(batch)
    assert total > 0
    assert session.unacknowledged_count == MAX_REPORTS_PER_MESSAGE + 5


def test_large_outputs_are_spread_over_messages_and_none_is_forgotten() -> None:
    session = session_with(100, output=b"x" * 65_536)
    sizes, seen = [], set()
    while batch := session.drain_reports(now_s=0.0):
        sizes.append(sum(report.size_bytes for report in batch))
        seen |= {report.assignment.attempt for report in batch}
    assert max(sizes) <= MAX_REPORT_MESSAGE_BYTES
    assert len(seen) == 100


def test_a_report_that_was_not_answered_is_sent_again_after_a_while() -> None:
    session = session_with(1)
    assert len(session.drain_reports(now_s=10.0)) == 1
    assert session.resend(sent_before_s=10.0) == 0
    assert session.resend(sent_before_s=10.1) == 1
    assert len(session.drain_reports(now_s=20.0)) == 1


def test_a_refused_report_becomes_an_error_and_then_a_release() -> None:
    session = session_with(1)
    [first] = session.drain_reports(now_s=0.0)
    session.acknowledged(first.assignment.attempt, AckStatus.INVALID, "too strange")
    [second] = session.drain_reports(now_s=0.0)
    assert isinstance(second.outcome, Failed)
    assert second.outcome.kind is FailureKind.AGENT_ERROR
    assert "too strange" in second.outcome.message
    session.acknowledged(second.assignment.attempt, AckStatus.INVALID, "still")
    [third] = session.drain_reports(now_s=0.0)
    assert third.outcome is None


def test_no_work_is_asked_for_while_reports_pile_up() -> None:
    session = session_with(90)
    session.set_slots(10)
    assert session.grant_credits(straggler_count=0) == 0


def test_the_end_of_a_session_clears_the_books() -> None:
    session = session_with(3)
    item = assignment()
    session.assigned(item, now_unix_s=0.0)
    assert session.ended() == [item.attempt]
    assert session.unacknowledged_count == 0
    assert session.runner == ""
