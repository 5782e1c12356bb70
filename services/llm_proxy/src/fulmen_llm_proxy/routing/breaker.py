"""A circuit breaker, which decides whether calls are sent to a backend.

```
CLOSED --three failures in a row, or half of the last sixteen calls, or three failed probes--> OPEN
OPEN --a successful probe; without probes, after a wait--> HALF_OPEN
HALF_OPEN --two calls succeed--> CLOSED
HALF_OPEN --a call or three probes fail--> OPEN, for twice as long
OPEN --two calls succeed that were sent for lack of another backend--> CLOSED
```

Invariant: the outcome of a call counts only in the period in which the call began. A call sent before the breaker
opened says nothing about the backend's present state.

Source: M. Nygard, "Release It!", chapter "Stability Patterns".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

FAILURES_IN_ROW = 3
TRIALS = 3
"""Maximum number of calls in flight while half open."""

SUCCESSES_TO_CLOSE = 2

_ROW = (1 << FAILURES_IN_ROW) - 1
_WINDOW = 16
_MASK = (1 << _WINDOW) - 1
_FAILED_OF_WINDOW = _WINDOW // 2
_MAX_DOUBLINGS = 4


class BreakerState(StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True, eq=False)
class Breaker:
    """The breaker of one backend.

    Attributes:
        clock: monotonic clock, seconds.
        recheck_s: initial open time, seconds; doubles after each failed trial, up to 16 times.
        probed: whether the backend's health is probed; an open period then ends by a probe, not by time.
    """

    clock: Callable[[], float]
    recheck_s: float
    probed: bool = False
    _state: BreakerState = BreakerState.CLOSED
    _period: int = 0
    _history: int = 0  # one bit per call, latest lowest; 1 means failed
    _failed_probes: int = 0
    _trials: int = 0
    _successes: int = 0
    _doublings: int = 0
    _open_until_s: float = 0.0

    @property
    def state(self) -> BreakerState:
        """The current state."""
        if self._state is BreakerState.OPEN and not self.probed and self.clock() >= self._open_until_s:
            self._enter(BreakerState.HALF_OPEN)
        return self._state

    @property
    def admits(self) -> bool:
        """Whether another call may be sent."""
        if self._state is BreakerState.CLOSED:
            return True
        return self.state is BreakerState.HALF_OPEN and self._trials < TRIALS

    def begin(self) -> int:
        """Counts a call that is sent, admitted or not; returns the period, to be passed back at its end."""
        if self._state is not BreakerState.CLOSED and self.state is BreakerState.HALF_OPEN:
            self._trials += 1
        return self._period

    def succeeded(self, period: int) -> bool:
        """Counts a successful call; returns whether it closed the breaker."""
        if period != self._period:
            return False
        self._failed_probes = 0
        if self._state is BreakerState.CLOSED:
            if self._history:
                self._history = self._history << 1 & _MASK
            return False
        self._successes += 1
        if self._successes < SUCCESSES_TO_CLOSE:
            self._end_trial()
            return False
        self._doublings = 0
        self._enter(BreakerState.CLOSED)
        return True

    def failed(self, period: int) -> None:
        """Counts a call that the backend failed."""
        if period != self._period:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._open(again=True)
        elif self._state is BreakerState.OPEN:
            self._successes = 0
        else:
            self._history = (self._history << 1 | 1) & _MASK
            if self._history & _ROW == _ROW or self._history.bit_count() >= _FAILED_OF_WINDOW:
                self._open(again=False)

    def abandoned(self, period: int) -> None:
        """Counts a call without a verdict on the backend: cancelled, refused, past its deadline."""
        if period == self._period:
            self._end_trial()

    def probe_succeeded(self) -> None:
        """Counts a successful health probe."""
        self.probed = True
        self._failed_probes = 0
        if self._state is BreakerState.OPEN:
            self._enter(BreakerState.HALF_OPEN)

    def probe_failed(self) -> None:
        """Counts a failed health probe."""
        self.probed = True
        self._failed_probes += 1
        if self._failed_probes >= FAILURES_IN_ROW and self._state is not BreakerState.OPEN:
            self._open(again=self._state is BreakerState.HALF_OPEN)

    def _end_trial(self) -> None:
        if self._state is BreakerState.HALF_OPEN:
            self._trials -= 1

    def _open(self, *, again: bool) -> None:
        self._doublings = min(self._doublings + 1, _MAX_DOUBLINGS) if again else 0
        self._open_until_s = self.clock() + self.recheck_s * (1 << self._doublings)
        self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._period += 1
        self._history = self._trials = self._successes = 0
