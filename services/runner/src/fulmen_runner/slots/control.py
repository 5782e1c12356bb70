"""Decides how many attempts run at once: one more step while all goes well, a share less when something is short.

Invariants: what is decided lies between floor and ceiling; it grows only while all slots are in use and attempts end
well, by one step at a time; it shrinks at most once for one cause, and then rests, so that what it decided can show. No
input or output, and no clock: the caller gives monotonic seconds.
Source: Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance" (1989).
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen_runner.slots.load import Load

DECREASE_FACTOR = 0.7
STEPS_TO_CEILING = 64
"""One step is so small a part of the ceiling, and at least one slot."""

GROWTH_INTERVAL_S = 5.0
DECREASE_PAUSE_S = 10.0
"""What runs goes on after a decrease: its effect takes a while."""

GROWTH_PAUSE_S = 20.0
"""How long nothing grows after a decrease."""

BAD_SHARE = 0.1
"""Attempts do not end well if more than this share of them ends by timeouts or by faults around the agent."""

REMEMBERED = 0.97
"""What share of the ends is remembered from look to look: half of them after 23 looks."""

NEAR_MEMORY_SHARE = 0.9
"""Nothing grows above this part of the memory at which it shrinks."""

BUSY_CPU = 0.95
SLOWER_FACTOR = 1.25
FAST_WEIGHT = 0.5
SLOW_WEIGHT = 0.05
"""Weights of a new mean duration in the quickly and in the slowly moving average."""


class SlotReason(StrEnum):
    """Why the number of slots changed; the words are those of the contract."""

    BUSY = "busy"
    THROTTLED = "throttled"
    MEMORY = "memory"
    SLOWER = "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPolicy:
    """Between what numbers to decide, and how much memory may be in use.

    Attributes:
        memory_share: share of the memory limit above which the number shrinks.
    """

    floor: int
    ceiling: int
    memory_share: float

    @property
    def step(self) -> int:
        """By how much the number grows at once."""
        return max(1, math.ceil(self.ceiling / STEPS_TO_CEILING))

    def within(self, count: int) -> int:
        """Returns the number nearest to one that may be decided."""
        return max(self.floor, min(self.ceiling, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChange:
    """A change that was decided."""

    at_s: float
    before: int
    after: int
    reason: SlotReason


@dataclass(slots=True)
class _Window:
    """What was seen since the number last changed (`well`, `badly`, older ones less) or was last looked at (the rest)."""

    well: float = 0.0
    badly: float = 0.0
    throttled: int = 0
    most_in_use: int = 0
    durations: list[float] = field(default_factory=list)


class SlotControl:
    """The number of slots, fixed or decided."""

    def __init__(self, *, policy: SlotPolicy, limit: int, automatic: bool) -> None:
        """Begins with a number; where it is decided, with the nearest one that may be."""
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
        """Sets the number; nothing is decided until `automate`."""
        self.automatic = False
        self.limit = limit

    def automate(self) -> None:
        """Lets the number be decided, beginning with what it is."""
        self.automatic = True
        self.limit = self.policy.within(self.limit)
        self._window = _Window()

    def ended(self, *, began_s: float, now_s: float, well: bool, throttled: int, in_use: int) -> None:
        """Notes the end of an attempt.

        Args:
            began_s: when it began.
            now_s: when it ended.
            well: whether nothing around the agent went wrong; the agent itself may have failed.
            throttled: how many of its model calls found no room.
            in_use: how many slots were in use, its own included.
        """
        window = self._window
        window.most_in_use = max(window.most_in_use, in_use)
        # What began before the last decrease tells of the load that the decrease was for.
        if throttled and began_s >= self._decreased_s:
            window.throttled += throttled
        if well:
            window.well += 1
            window.durations.append(now_s - began_s)
        else:
            window.badly += 1

    def decide(self, *, now_s: float, in_use: int, load: Load | None) -> SlotChange | None:
        """Changes the number if that is due; to be called every second or so. None: it stays."""
        window = self._window
        window.most_in_use = max(window.most_in_use, in_use)
        slower = self._is_slower()
        change = self._decided(now_s, self._shortage(load, slower=slower), load) if self.automatic else None
        if change is None:
            self._window = _Window(
                well=REMEMBERED * window.well,
                badly=REMEMBERED * window.badly,
                throttled=self._kept_throttles(now_s),
            )
        else:
            self._window = _Window()
            self.limit, self.last_change = change.after, change
            self.change_counts[change.reason] += 1
        return change

    def _kept_throttles(self, now_s: float) -> int:
        """Returns what a decrease that has to wait for its pause is told later; nothing if it is decided nothing."""
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
        # Slots that nobody uses take no room: what is in use shrinks.
        base = min(self.limit, max(self._window.most_in_use, self.policy.floor))
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
        ended_well = window.well >= 1 and window.badly <= BAD_SHARE * (window.well + window.badly)
        roomy = _memory_share(load) < NEAR_MEMORY_SHARE * self.policy.memory_share
        idle_cpu = load is None or load.cpu < BUSY_CPU
        return rested and ended_well and roomy and idle_cpu and window.most_in_use >= self.limit

    def _is_slower(self) -> bool:
        """Takes the durations since the last look into account; tells whether attempts take longer than they did."""
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
