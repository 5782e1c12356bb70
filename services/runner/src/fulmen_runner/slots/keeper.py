"""Feeds ended attempts to the slot control and applies its decisions."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.executor import Captures, Execute
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.slots.control import SlotControl
from fulmen_runner.slots.load import Load, LoadMeter, SlotLoad

INTERVAL_S = 1.0

_NOT_THE_AGENTS = frozenset({FailureKind.INFRA, FailureKind.TIMEOUT})

_log = structlog.get_logger()


class SlotMonitor:
    """Observes attempts and the proxies' captures for the slot control."""

    def __init__(
        self, control: SlotControl, captures: Captures, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._control = control
        self._captures = captures
        self._clock = clock
        self._running = 0
        self._throttled: dict[str, int] = {}

    async def reach(self) -> None:
        """Waits until a proxy answers. Raises CapturesUnavailable."""
        await self._captures.reach()

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Returns the proxies' summary of an attempt. Raises CapturesUnavailable."""
        evidence = await self._captures.flush(attempt)
        if evidence.throttled_count:
            self._throttled[attempt] = evidence.throttled_count
        return evidence

    def observed(self, execute: Execute) -> Execute:
        """Wraps `execute` to report each end to the control; stopped attempts are not reported."""

        async def run(assignment: Assignment) -> Outcome:
            started_s = self._clock()
            self._running += 1
            try:
                outcome = await execute(assignment)
                self._control.ended(
                    started_s=started_s,
                    now_s=self._clock(),
                    good=not isinstance(outcome, Failed) or outcome.kind not in _NOT_THE_AGENTS,
                    throttled=self._throttled.get(assignment.attempt, 0),
                    in_use=self._running,
                )
            finally:
                self._running -= 1
                self._throttled.pop(assignment.attempt, None)
            return outcome

        return run


class SlotKeeper:
    """Background role: applies the control's decisions. Nothing else changes the session's slots."""

    def __init__(
        self,
        *,
        control: SlotControl,
        pool: AttemptPool,
        meter: LoadMeter,
        configured: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initializes the role.

        Args:
            control: Decides.
            pool: Its session has the slots.
            meter: Load of the machine.
            configured: Largest number of slots that the settings allow.
            clock: Monotonic clock, in seconds.
        """
        self.control = control
        self._pool = pool
        self._meter = meter
        self._configured = configured
        self._clock = clock

    @property
    def in_use(self) -> int:
        """Slots held by running attempts and stragglers."""
        return len(self._pool.session.running) + len(self._pool.stragglers)

    async def run(self) -> None:
        """Decides once a second until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.decide()

    def decide(self) -> None:
        """Asks the control for a decision and applies it."""
        change = self.control.decide(now_s=self._clock(), in_use=self.in_use, load=self._meter.latest)
        if change is not None:
            _log.info(
                "slots_changed", before=change.before, after=change.after, reason=change.reason.value,
                in_use=self.in_use,
            )  # fmt: skip
            self._apply()

    def fix(self, count: int) -> None:
        """Sets a fixed number of slots."""
        self.control.fix(count)
        _log.info("slots_fixed", count=count)
        self._apply()

    def automate(self) -> None:
        """Switches to an automatic number of slots."""
        self.control.automate()
        _log.info("slots_automatic", count=self.control.limit)
        self._apply()

    def load(self) -> Load | None:
        """Returns the latest load sample with the current slots, or None."""
        measured = self._meter.latest
        if measured is None:
            return None
        slots = SlotLoad(
            configured=self._configured,
            in_use=self.in_use,
            limit=self.control.limit,
            automatic=self.control.automatic,
        )
        return replace(measured, slots=slots)

    def _apply(self) -> None:
        self._pool.session.set_slots(self.control.limit)
        self._pool.changed.set()
