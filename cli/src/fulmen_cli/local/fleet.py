"""How many runners a local stack has: within what limits, and when one starts or drains. Pure, and quick to import."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FleetPace", "FleetRange", "fleet_range", "most_runners_here"]

START_PAUSE_S: Final = 5.0
SHRINK_AFTER_S: Final = 30.0
SHRINK_PAUSE_S: Final = 10.0

MOST_RUNNERS: Final = 64
BYTES_PER_RUNNER: Final = 512 * 2**20
# What the other services and the database need.
BYTES_BESIDES: Final = 1024 * 2**20
MEMORY_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")

_RANGE: Final = re.compile(r"auto(?::(\d{1,4})-(\d{1,4}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRange:
    """Between what numbers the runners are; `least == most` is a fixed number."""

    least: int
    most: int


def fleet_range(text: str) -> FleetRange:
    """Reads `3`, `auto` or `auto:1-8`; `0` is for who runs runners of another kind.

    Raises:
        ValueError: if it is none of these, or out of 0 to 64; `auto` begins with 1.
    """
    if text.isdecimal():
        least = most = int(text[:9])
        if not least:
            return FleetRange(least=0, most=0)
    elif match := _RANGE.fullmatch(text):
        least, most = (int(match[1]), int(match[2])) if match[1] else (1, most_runners_here())
    else:
        raise ValueError("write a number, `auto`, or `auto:MIN-MAX`")
    if not 1 <= least <= most <= MOST_RUNNERS:
        raise ValueError(f"runners are 0 to {MOST_RUNNERS}, MIN is 1 or more and not greater than MAX")
    return FleetRange(least=least, most=most)


def most_runners_here() -> int:
    """Returns how many runners this machine bears: one per processor, each with 512 MiB of its memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = MEMORY_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    if limit.isdecimal():
        memory_bytes = min(memory_bytes, int(limit))
    return max(1, min(cpus, (memory_bytes - BYTES_BESIDES) // BYTES_PER_RUNNER, MOST_RUNNERS))


class FleetPace:
    """Decides how many runners to start or to drain now. Pure: the caller gives monotonic seconds.

    Invariants: it never leaves the range; it at most doubles the runners at once, and not again before these had time to
    work; it drains one at a time, and only when fewer were wanted for a while.
    """

    def __init__(
        self,
        limits: FleetRange,
        *,
        start_pause_s: float = START_PAUSE_S,
        shrink_after_s: float = SHRINK_AFTER_S,
        shrink_pause_s: float = SHRINK_PAUSE_S,
    ) -> None:
        """Takes the limits and the pauses."""
        self.limits = limits
        self._start_pause_s = start_pause_s
        self._shrink_after_s = shrink_after_s
        self._shrink_pause_s = shrink_pause_s
        self._wanted: deque[tuple[float, int]] = deque()
        self._first_s: float | None = None
        self._started_s = -math.inf
        self._drained_s = -math.inf

    def decide(self, *, now_s: float, wanted: int, count: int) -> int:
        """Returns how many to start, negative: to drain; to be called every few seconds.

        Args:
            now_s: monotonic seconds.
            wanted: what the work wants now.
            count: how many run and do not drain.
        """
        wanted = max(self.limits.least, min(self.limits.most, wanted))
        self._first_s = now_s if self._first_s is None else self._first_s
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - self._shrink_after_s:
            self._wanted.popleft()
        if wanted > count:
            return self._start(now_s, min(wanted - count, max(1, count)))
        lately = max(each for _, each in self._wanted)
        watched = now_s - max(self._first_s, self._started_s) >= self._shrink_after_s
        if lately < count and watched and now_s - self._drained_s >= self._shrink_pause_s:
            self._drained_s = now_s
            return -1
        return 0

    def _start(self, now_s: float, more: int) -> int:
        if now_s - self._started_s < self._start_pause_s:
            return 0
        self._started_s = now_s
        return more
