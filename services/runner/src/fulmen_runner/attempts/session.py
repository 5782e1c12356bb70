"""State of one runner session: running attempts, pending reports and granted credits. Free of I/O.

Invariants: credits are granted only while running attempts + stragglers + open credits are below the slots. A report is
pending until the store acknowledges it, and is resent on every new stream until then.
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
"""No credit is granted while more reports than this per slot are pending."""

REPORT_OVERHEAD_BYTES = 512


class AckStatus(StrEnum):
    """The store's answer to a report."""

    APPLIED = "APPLIED"
    DUPLICATE = "DUPLICATE"
    LEASE_LOST = "LEASE_LOST"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running attempt; `start_unix_s` is its start on this runner."""

    assignment: Assignment
    start_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An outcome to report; None releases the lease without one."""

    assignment: Assignment
    outcome: Outcome | None

    @property
    def size_bytes(self) -> int:
        """Approximate size on the wire."""
        if self.outcome is None:
            return REPORT_OVERHEAD_BYTES
        rewards = () if isinstance(self.outcome, Failed) else self.outcome.rewards
        # A character has up to four bytes.
        printed = 4 * (len(self.outcome.printed.stdout) + len(self.outcome.printed.stderr))
        output = len(self.outcome.output.content)
        return REPORT_OVERHEAD_BYTES + output + printed + MAX_MESSAGE_BYTES + 100 * len(rewards)


@dataclass(slots=True)
class _Pending:
    report: Report
    sent_at_s: float | None = None
    refusals: int = 0


@dataclass(slots=True)
class LeaseSession:
    """State of the session. Times are monotonic seconds, passed in by the caller."""

    slots: int
    runner: str = ""
    draining: bool = False
    ended_counts: Counter[FailureKind | None] = field(default_factory=Counter)
    running: dict[str, Running] = field(default_factory=dict)
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _open_credits: int = 0

    @property
    def completed_count(self) -> int:
        """Number of attempts with an outcome; `ended_counts` has it by failure kind, None for success."""
        return self.ended_counts.total()

    @property
    def unacknowledged_count(self) -> int:
        """Number of reports that the store has not acknowledged."""
        return len(self._pending)

    def held_attempts(self) -> list[str]:
        """Returns the attempts to name when the session resumes: running, or with a pending report."""
        return [*self.running, *(name for name in self._pending if name not in self.running)]

    def opened(self, runner: str) -> None:
        """Records a new stream: drops the credits of the previous one and resends pending reports."""
        self.runner = runner
        self._open_credits = 0
        for pending in self._pending.values():
            pending.sent_at_s = None

    def ended(self) -> list[str]:
        """Records that the store ended the session; returns the attempts to stop, which are not reported."""
        self.runner = ""
        self._open_credits = 0
        self._pending.clear()
        return list(self.running)

    def grant_credits(self, *, straggler_count: int) -> int:
        """Returns the number of credits to grant now and counts them as open."""
        if self.draining or len(self._pending) > MAX_REPORTS_PER_SLOT * self.slots:
            return 0
        free = self.slots - len(self.running) - straggler_count - self._open_credits
        granted = max(0, min(free, MAX_CREDITS_PER_MESSAGE))
        self._open_credits += granted
        return granted

    def assigned(self, assignment: Assignment, *, now_unix_s: float) -> bool:
        """Records an assignment; returns True if it is to be run. While draining, it is released instead."""
        self._open_credits = max(0, self._open_credits - 1)
        if assignment.attempt in self.running:
            return False
        if self.draining:
            self._pending[assignment.attempt] = _Pending(report=Report(assignment=assignment, outcome=None))
            return False
        self.running[assignment.attempt] = Running(assignment=assignment, start_unix_s=now_unix_s)
        return True

    def finished(self, assignment: Assignment, outcome: Outcome | None) -> None:
        """Records the end of an attempt, to be reported; outcome None releases its lease."""
        self.running.pop(assignment.attempt, None)
        self._pending[assignment.attempt] = _Pending(report=Report(assignment=assignment, outcome=outcome))
        if outcome is not None:
            self.ended_counts[outcome.kind if isinstance(outcome, Failed) else None] += 1

    def forget(self, attempt: str) -> None:
        """Drops an attempt whose lease is lost, with its pending report."""
        self.running.pop(attempt, None)
        self._pending.pop(attempt, None)

    def drain_reports(self, *, now_s: float) -> list[Report]:
        """Returns the unsent reports that fit into one message, oldest first, and marks them as sent."""
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

    def resend(self, *, sent_before_s: float) -> int:
        """Marks unanswered reports sent before a time as unsent; returns their number."""
        late = [p for p in self._pending.values() if p.sent_at_s is not None and p.sent_at_s < sent_before_s]
        for pending in late:
            pending.sent_at_s = None
        return len(late)

    def acknowledged(self, attempt: str, status: AckStatus, message: str) -> None:
        """Records the store's answer. A report rejected as INVALID is replaced by a failure with the reason; if that is
        rejected too, the lease is released.
        """
        pending = self._pending.get(attempt)
        if pending is None:
            return
        if status is not AckStatus.INVALID or pending.report.outcome is None:
            # A rejected release needs no further report: the lease expires.
            del self._pending[attempt]
            return
        outcome = None
        if not pending.refusals:
            text = cut_at_front(f"store rejected the result of the attempt: {message}")
            outcome = Failed(kind=FailureKind.AGENT_ERROR, message=text)
        report = Report(assignment=pending.report.assignment, outcome=outcome)
        self._pending[attempt] = _Pending(report=report, refusals=pending.refusals + 1)

    def set_slots(self, slots: int) -> None:
        """Changes the number of slots; running attempts and open credits stay."""
        self.slots = slots
