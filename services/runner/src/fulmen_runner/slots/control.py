"""Decides the number of slots: additive increase while attempts end well, multiplicative decrease under a shortage.

Invariants: the decided number lies between `min_slots` and `max_slots`. It grows only while all slots are in use and
attempts end well, by one step at a time. It shrinks at most once per cause, then pauses until the effect can show. Free
of I/O; the caller passes monotonic seconds.
Source: Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance" (1989).
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen_runner.slots.load import Load

DECREASE_FACTOR = 0.7
STEPS_TO_CEILING = 64
"""Size of a step: `max_slots` divided by this, at least one slot."""

GROWTH_INTERVAL_S = 5.0
DECREASE_PAUSE_S = 10.0
"""Minimum time between decreases: running attempts continue, so a decrease takes effect slowly."""

GROWTH_PAUSE_S = 20.0
"""Minimum time between a decrease and the next increase."""

MAX_BAD_SHARE = 0.1
"""Share of attempts ending in TIMEOUT or INFRA above which the number does not grow."""

DECAY = 0.97
"""Decay of the counts of ended attempts per decision: a half-life of 23 decisions."""

NEAR_MEMORY_SHARE = 0.9
"""Fraction of `memory_share` above which the number does not grow."""

BUSY_CPU = 0.95
SLOWER_FACTOR = 1.25
FAST_WEIGHT = 0.5
SLOW_WEIGHT = 0.05
"""Weights of a new mean duration in the fast and the slow moving average."""


class SlotReason(StrEnum):
    """Why the number of slots changed; the values match the contract's."""

    BUSY = "busy"
    THROTTLED = "throttled"
    MEMORY = "memory"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPolicy:
    """Bounds of the decision.

    Attributes:
        min_slots: Smallest number of slots.
        max_slots: Largest number of slots.
        memory_share: Share of the memory limit above which the number shrinks.
    """

    min_slots: int
    max_slots: int
    memory_share: float

    @property
    def step(self) -> int:
        """Size of an increase."""
        return max(1, math.ceil(self.max_slots / STEPS_TO_CEILING))

    def within(self, count: int) -> int:
        """Returns the count clamped to the bounds."""
        return max(self.min_slots, min(self.max_slots, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChange:
    """A decided change."""

    at_s: float
    before: int
    after: int
    reason: SlotReason


@dataclass(slots=True)
class _Window:
    """Observations since the last change (`good`, `bad`, decaying) or since the last decision (the others)."""

    good: float = 0.0
    bad: float = 0.0
    throttled: int = 0
    max_in_use: int = 0
    durations: list[float] = field(default_factory=list)


class SlotControl:
    """The number of slots, fixed or automatic."""

    def __init__(self, *, policy: SlotPolicy, limit: int, automatic: bool) -> None:
        self.policy = policy
        self.automatic = automatic
        self.limit = policy.within(limit) if automatic else limit
        self.last_change: SlotChange | None = None
        self.change_counts: Counter[SlotReason] = Counter()
        self._window = _Window()
        self._decreased_s = -math.inf
        self._grown_s = -math.inf
        self._fast_s: float | None = None
        self._slow_s: float | None = None

    def fix(self, limit: int) -> None:
        """Sets a fixed number of slots."""
        self.automatic = False
        self.limit = limit

    def automate(self) -> None:
        """Switches to automatic, starting from the current number."""
        self.automatic = True
        self.limit = self.policy.within(self.limit)
        self._window = _Window()

    def ended(self, *, started_s: float, now_s: float, good: bool, throttled: int, in_use: int) -> None:
        """Records the end of an attempt.

        Args:
            started_s: Start of the attempt.
            now_s: End of the attempt.
            good: False after TIMEOUT or INFRA; True also if the agent itself failed.
            throttled: Number of its model calls that were throttled.
            in_use: Slots in use, including its own.
        """
        window = self._window
        window.max_in_use = max(window.max_in_use, in_use)
        # An attempt that started before the last decrease reflects the load that caused the decrease.
        if throttled and started_s >= self._decreased_s:
            window.throttled += throttled
        if good:
            window.good += 1
            window.durations.append(now_s - started_s)
        else:
            window.bad += 1

    def decide(self, *, now_s: float, in_use: int, load: Load | None) -> SlotChange | None:
        """Changes the number if due; call about once a second. Returns None if it stays."""
        window = self._window
        window.max_in_use = max(window.max_in_use, in_use)
        slower = self._is_slower()
        change = self._decided(now_s, self._shortage(load, slower=slower), load) if self.automatic else None
        if change is None:
            self._window = _Window(
                good=DECAY * window.good,
                bad=DECAY * window.bad,
                throttled=self._kept_throttles(now_s),
            )
        else:
            self._window = _Window()
            self.limit, self.last_change = change.after, change
            self.change_counts[change.reason] += 1
        return change

    def _kept_throttles(self, now_s: float) -> int:
        """Returns the throttle count to carry over while a decrease waits for its pause."""
        waits = self.automatic and now_s < self._decreased_s + DECREASE_PAUSE_S
        return self._window.throttled if waits else 0

    def _decided(self, now_s: float, shortage: SlotReason | None, load: Load | None) -> SlotChange | None:
        if shortage is not None:
            return self._decreased(now_s, shortage)
        if self._may_grow(now_s, load):
            self._grown_s = now_s
            return self._changed(now_s, self.policy.within(self.limit + self.policy.step), SlotReason.BUSY)
        return None

    def _decreased(self, now_s: float, reason: SlotReason) -> SlotChange | None:
        if now_s < self._decreased_s + DECREASE_PAUSE_S:
            return None
        self._decreased_s = now_s
        # Unused slots cause no load: shrink from the slots in use.
        base = min(self.limit, max(self._window.max_in_use, self.policy.min_slots))
        return self._changed(now_s, self.policy.within(math.floor(base * DECREASE_FACTOR)), reason)

    def _changed(self, now_s: float, after: int, reason: SlotReason) -> SlotChange | None:
        if after == self.limit:
            return None
        return SlotChange(at_s=now_s, before=self.limit, after=after, reason=reason)

    def _shortage(self, load: Load | None, *, slower: bool) -> SlotReason | None:
        if _memory_share(load) > self.policy.memory_share:
            return SlotReason.MEMORY
        if self._window.throttled:
            return SlotReason.THROTTLED
        if slower and load is not None and load.cpu >= BUSY_CPU:
            return SlotReason.SLOWER
        return None

    def _may_grow(self, now_s: float, load: Load | None) -> bool:
        window = self._window
        rested = now_s >= self._grown_s + GROWTH_INTERVAL_S and now_s >= self._decreased_s + GROWTH_PAUSE_S
        ended_well = window.good >= 1 and window.bad <= MAX_BAD_SHARE * (window.good + window.bad)
        free_memory = _memory_share(load) < NEAR_MEMORY_SHARE * self.policy.memory_share
        idle_cpu = load is None or load.cpu < BUSY_CPU
        return rested and ended_well and free_memory and idle_cpu and window.max_in_use >= self.limit

    def _is_slower(self) -> bool:
        """Updates the moving averages; returns True if attempts take longer than before."""
        durations = self._window.durations
        if durations:
            mean_s = sum(durations) / len(durations)
            self._fast_s = _moved(self._fast_s, mean_s, FAST_WEIGHT)
            self._slow_s = _moved(self._slow_s, mean_s, SLOW_WEIGHT)
        return self._fast_s is not None and self._slow_s is not None and self._fast_s > SLOWER_FACTOR * self._slow_s


def _moved(average: float | None, value: float, weight: float) -> float:
    return value if average is None else average + weight * (value - average)


def _memory_share(load: Load | None) -> float:
    return load.memory_bytes / load.memory_limit_bytes if load is not None and load.memory_limit_bytes else 0.0
