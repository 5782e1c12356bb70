"""Keeps the number of slots: shows attempts to the control, lets it decide every second, applies what it decides."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.classification import CaptureEvidence, InstanceIds
from fulmen_runner.attempts.executor import Captures, Execute
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.slots.control import SlotControl
from fulmen_runner.slots.load import Load, SlotLoad

INTERVAL_S = 1.0

_NOT_THE_AGENTS = frozenset({FailureKind.INFRA, FailureKind.TIMEOUT})

_log = structlog.get_logger()


class SlotWitness:
    """Stands between the pool, the executor and the proxies' answers, and tells the control what became of attempts."""

    def __init__(
        self, control: SlotControl, captures: Captures, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the control, who knows what the proxies recorded, and monotonic seconds."""
        self._control = control
        self._captures = captures
        self._clock = clock
        self._running = 0
        self._throttled: dict[str, int] = {}

    async def instances(self) -> InstanceIds:
        """Returns the proxies that run now. Raises CapturesUnavailable."""
        return await self._captures.instances()

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Returns what the proxies recorded of an attempt. Raises CapturesUnavailable."""
        evidence = await self._captures.flush(attempt)
        if evidence.throttled_count:
            self._throttled[attempt] = evidence.throttled_count
        return evidence

    def watched(self, execute: Execute) -> Execute:
        """Returns what runs an attempt as `execute` does, seen by the control; a stopped one tells nothing."""

        async def run(assignment: Assignment) -> Outcome:
            began_s = self._clock()
            self._running += 1
            try:
                outcome = await execute(assignment)
                self._control.ended(
                    began_s=began_s,
                    now_s=self._clock(),
                    well=not isinstance(outcome, Failed) or outcome.kind not in _NOT_THE_AGENTS,
                    throttled=self._throttled.get(assignment.attempt, 0),
                    in_use=self._running,
                )
            finally:
                self._running -= 1
                self._throttled.pop(assignment.attempt, None)
            return outcome

        return run


class SlotKeeper:
    """Background role: applies what the control decides; the one place that changes the session's slots."""

    def __init__(
        self,
        *,
        control: SlotControl,
        pool: AttemptPool,
        measured: Callable[[], Load | None],
        configured: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wires the role.

        Args:
            control: what decides.
            pool: what has the slots.
            measured: what was measured of the machine last, None if nothing was.
            configured: the most slots that the settings allow.
            clock: monotonic seconds.
        """
        self.control = control
        self._pool = pool
        self._measured = measured
        self._configured = configured
        self._clock = clock

    @property
    def in_use(self) -> int:
        """Slots that running attempts and stragglers hold."""
        return len(self._pool.session.running) + len(self._pool.stragglers)

    async def run(self) -> None:
        """Looks every second until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Lets the control decide, and applies it."""
        change = self.control.decide(now_s=self._clock(), in_use=self.in_use, load=self._measured())
        if change is not None:
            _log.info(
                "slots_changed", before=change.before, after=change.after, reason=change.reason.value,
                in_use=self.in_use,
            )  # fmt: skip
            self._apply()

    def fix(self, count: int) -> None:
        """Sets the number of slots."""
        self.control.fix(count)
        _log.info("slots_fixed", count=count)
        self._apply()

    def automate(self) -> None:
        """Lets the control decide from now on."""
        self.control.automate()
        _log.info("slots_automatic", count=self.control.limit)
        self._apply()

    def load(self) -> Load | None:
        """Returns what was measured last, with the slots as they are now; None if nothing was measured."""
        measured = self._measured()
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
