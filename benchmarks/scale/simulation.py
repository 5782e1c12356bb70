"""Time, and what is to happen in it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Simulation:
    """Time, and what is to happen."""

    now_s: float = 0.0
    counts: bool = False
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Lets something happen later."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), what))

    def run(self, until_s: float) -> None:
        """Lets time pass."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
        self.now_s = until_s
