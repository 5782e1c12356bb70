"""Runs assigned attempts as tasks.

Invariant: every attempt that was started leaves the session exactly once: reported, released or forgotten.
"""

import asyncio
import time
from collections.abc import Iterable
from enum import Enum, auto
from functools import partial

import structlog

from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.executor import Execute
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome
from fulmen_runner.attempts.session import LeaseSession
from fulmen_runner.attempts.stragglers import Stragglers

STOP_ALL_TIMEOUT_S = 10.0

_log = structlog.get_logger()


class StopReason(Enum):
    """Why a running attempt is stopped."""

    CANCELLED = auto()
    LEASE_LOST = auto()
    RELEASED = auto()


class AttemptPool:
    """The running attempts.

    Attributes:
        changed: Set when there may be something to send to the store.
        acknowledged: Set when the store has acknowledged reports.
    """

    def __init__(self, *, session: LeaseSession, execute: Execute, stragglers: Stragglers) -> None:
        self.session = session
        self.stragglers = stragglers
        self.changed = asyncio.Event()
        self.acknowledged = asyncio.Event()
        self._execute = execute
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reasons: dict[str, StopReason] = {}
        stragglers.on_change = self.changed.set

    def start(self, assignments: Iterable[Assignment]) -> None:
        """Starts assigned attempts; while draining, releases them instead."""
        for assignment in assignments:
            if self.session.assigned(assignment, now_unix_s=time.time()):
                task = asyncio.create_task(self._attempt(assignment), name=f"run {assignment.attempt}")
                self._tasks[assignment.attempt] = task
                task.add_done_callback(partial(self._ended, assignment))
                _log.debug("attempt_started", attempt=assignment.attempt, agent=assignment.agent)
        self.changed.set()

    def stop(self, attempts: Iterable[str], reason: StopReason) -> None:
        """Cancels attempts; unknown names are ignored."""
        for attempt in attempts:
            task = self._tasks.get(attempt)
            if reason is StopReason.LEASE_LOST:
                self.session.forget(attempt)
            if task is not None and attempt not in self._reasons:
                self._reasons[attempt] = reason
                task.cancel()
        self.changed.set()

    async def stop_all(self, reason: StopReason) -> None:
        """Cancels all attempts and waits for up to `STOP_ALL_TIMEOUT_S`."""
        tasks = list(self._tasks.values())
        self.stop(list(self._tasks), reason)
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_ALL_TIMEOUT_S)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no attempt is running; returns False on timeout."""
        deadline = time.monotonic() + timeout_s
        while self._tasks:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await asyncio.wait(list(self._tasks.values()), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _attempt(self, assignment: Assignment) -> None:
        try:
            outcome = await self._execute(assignment)
        except Exception:  # noqa: BLE001  # A bug in the runner must not end the other attempts.
            _log.exception("attempt_crashed", attempt=assignment.attempt)
            outcome = Failed(kind=FailureKind.INFRA, message="internal error of the runner; see its log")
        if assignment.attempt not in self._reasons:
            self._finish(assignment, outcome)

    def _ended(self, assignment: Assignment, _: asyncio.Task[None]) -> None:
        del self._tasks[assignment.attempt]
        reason = self._reasons.pop(assignment.attempt, None)
        if reason is not None:
            self._stopped(assignment, reason)
        self.changed.set()

    def _finish(self, assignment: Assignment, outcome: Outcome | None) -> None:
        if assignment.attempt in self.session.running:
            kind = outcome.kind.value if isinstance(outcome, Failed) else ""
            _log.debug("attempt_finished", attempt=assignment.attempt, failure_kind=kind, released=outcome is None)
            self.session.finished(assignment, outcome)

    def _stopped(self, assignment: Assignment, reason: StopReason) -> None:
        _log.info("attempt_stopped", attempt=assignment.attempt, reason=reason.name)
        match reason:
            case StopReason.CANCELLED:
                self._finish(assignment, Failed(kind=FailureKind.CANCELLED, message="rollout was cancelled"))
            case StopReason.RELEASED:
                self._finish(assignment, None)
            case StopReason.LEASE_LOST:
                self.session.forget(assignment.attempt)
