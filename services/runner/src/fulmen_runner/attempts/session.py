"""The books of one runner session: what runs, what is to be reported, how much more is asked for. No input or output.

Invariants: running attempts + stragglers + open credits never exceed the slots by what the runner itself asked for;
a report stays in the books until the store has acknowledged it, and is sent again on every new stream until then.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES, Failed, FailureKind, Outcome, cut_at_front

MAX_REPORTS_PER_MESSAGE = 1000
MAX_REPORT_MESSAGE_BYTES = 3 * 1024 * 1024
MAX_CREDITS_PER_MESSAGE = 10_000
MAX_REPORTS_PER_SLOT = 8
"""No new work is asked for while more reports than this for each slot wait for the store."""

REPORT_OVERHEAD_BYTES = 512


class AckStatus(StrEnum):
    """What the store did with a report."""

    APPLIED = "APPLIED"
    DUPLICATE = "DUPLICATE"
    LEASE_LOST = "LEASE_LOST"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An attempt that runs; `start_unix_s` is when it began here."""

    assignment: Assignment
    start_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An outcome for the store; None gives the lease back unrun."""

    assignment: Assignment
    outcome: Outcome | None

    @property
    def size_bytes(self) -> int:
        """About how large it is on the wire."""
        if self.outcome is None:
            return REPORT_OVERHEAD_BYTES
        rewards = () if isinstance(self.outcome, Failed) else self.outcome.rewards
        return REPORT_OVERHEAD_BYTES + len(self.outcome.output.content) + MAX_MESSAGE_BYTES + 100 * len(rewards)


@dataclass(slots=True)
class _Pending:
    report: Report
    sent_at_s: float | None = None
    refusals: int = 0


@dataclass(slots=True)
class LeaseSession:
    """The books. Times are seconds of one monotonic clock, given by the caller."""

    slots: int
    runner: str = ""
    draining: bool = False
    ended_counts: Counter[FailureKind | None] = field(default_factory=Counter)
    running: dict[str, Running] = field(default_factory=dict)
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _open_credits: int = 0

    @property
    def completed_count(self) -> int:
        """Attempts that ended with an outcome; `ended_counts` has them by failure kind, None for success."""
        return self.ended_counts.total()

    @property
    def unacknowledged_count(self) -> int:
        """Reports that the store has not acknowledged yet."""
        return len(self._pending)

    def held_attempts(self) -> list[str]:
        """Returns every attempt that the runner still has something to say about: to be named when it resumes."""
        return [*self.running, *(name for name in self._pending if name not in self.running)]

    def opened(self, runner: str) -> None:
        """Notes a new stream: credits of the last one are gone, and what was not acknowledged is sent again."""
        self.runner = runner
        self._open_credits = 0
        for pending in self._pending.values():
            pending.sent_at_s = None

    def ended(self) -> list[str]:
        """Notes that the store has ended the session; returns the attempts to stop. Nothing is reported of them."""
        self.runner = ""
        self._open_credits = 0
        self._pending.clear()
        return list(self.running)

    def take_demand(self, *, straggler_count: int) -> int:
        """Returns how many credits to grant now, and counts them as granted."""
        if self.draining or len(self._pending) > MAX_REPORTS_PER_SLOT * self.slots:
            return 0
        free = self.slots - len(self.running) - straggler_count - self._open_credits
        granted = max(0, min(free, MAX_CREDITS_PER_MESSAGE))
        self._open_credits += granted
        return granted

    def assigned(self, assignment: Assignment, *, now_unix_s: float) -> bool:
        """Notes an assignment; returns whether to run it. While the runner drains it is given back instead."""
        self._open_credits = max(0, self._open_credits - 1)
        if assignment.attempt in self.running:
            return False
        if self.draining:
            self._pending[assignment.attempt] = _Pending(report=Report(assignment=assignment, outcome=None))
            return False
        self.running[assignment.attempt] = Running(assignment=assignment, start_unix_s=now_unix_s)
        return True

    def finished(self, assignment: Assignment, outcome: Outcome | None) -> None:
        """Notes the end of an attempt, to be reported; outcome None gives its lease back."""
        self.running.pop(assignment.attempt, None)
        self._pending[assignment.attempt] = _Pending(report=Report(assignment=assignment, outcome=outcome))
        if outcome is not None:
            self.ended_counts[outcome.kind if isinstance(outcome, Failed) else None] += 1

    def forget(self, attempt: str) -> None:
        """Drops an attempt whose lease is gone: nothing is reported of it."""
        self.running.pop(attempt, None)
        self._pending.pop(attempt, None)

    def take_reports(self, *, now_s: float) -> list[Report]:
        """Returns reports to send in one message, oldest first, and notes that they were sent."""
        batch: list[Report] = []
        size = 0
        for pending in self._pending.values():
            if pending.sent_at_s is not None:
                continue
            size += pending.report.size_bytes
            if batch and (len(batch) == MAX_REPORTS_PER_MESSAGE or size > MAX_REPORT_MESSAGE_BYTES):
                break
            pending.sent_at_s = now_s
            batch.append(pending.report)
        return batch

    def send_again(self, *, sent_before_s: float) -> int:
        """Marks reports that were sent before a time and have no answer, to be sent again; returns how many."""
        late = [p for p in self._pending.values() if p.sent_at_s is not None and p.sent_at_s < sent_before_s]
        for pending in late:
            pending.sent_at_s = None
        return len(late)

    def acknowledged(self, attempt: str, status: AckStatus, message: str) -> None:
        """Notes the store's answer. A report that the store calls malformed is replaced by one that says so; if that
        is refused too, the lease is given back.
        """
        pending = self._pending.get(attempt)
        if pending is None:
            return
        if status is not AckStatus.INVALID or pending.report.outcome is None:
            # A release that is refused has nothing further to say: the lease runs out by itself.
            del self._pending[attempt]
            return
        outcome = None
        if not pending.refusals:
            text = cut_at_front(f"The store refused the attempt's result: {message}")
            outcome = Failed(kind=FailureKind.AGENT_ERROR, message=text)
        report = Report(assignment=pending.report.assignment, outcome=outcome)
        self._pending[attempt] = _Pending(report=report, refusals=pending.refusals + 1)

    def set_slots(self, slots: int) -> None:
        """Changes how many attempts may run at once; running ones go on, credits already granted stay."""
        self.slots = slots
