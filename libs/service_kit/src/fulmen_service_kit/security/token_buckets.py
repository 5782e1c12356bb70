"""Rates of something that many names do, such as the forged keys of an address. Not thread-safe: use it on one event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_NAMES: Final = 10_000
_MINUTE_S: Final = 60.0


class TokenBuckets:
    """A token bucket for each name that has taken from its own recently."""

    def __init__(
        self,
        *,
        per_s: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
        max_names: int = MAX_NAMES,
    ) -> None:
        """Initializes an empty table.

        Args:
            per_s: Tokens per second of each name; 0 for no limit.
            burst: Tokens that a name may take without a wait.
            clock: Monotonic clock, in seconds.
            max_names: Size of the table; the name that took least recently is dropped first.
        """
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._max_names = max_names
        # Remaining tokens and time of each bucket, ordered by the last use.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @classmethod
    def per_minute(cls, number: int, clock: Callable[[], float] = time.monotonic) -> TokenBuckets:
        """Returns buckets of a number of tokens, each filled in a minute; 0 for no limit."""
        return cls(per_s=number / _MINUTE_S, burst=number, clock=clock)

    def take(self, name: str) -> float:
        """Takes a token; returns the time until there is one in seconds, 0 if it was there."""
        if not self._per_s:
            return 0.0
        now_s = self._clock()
        left, since_s = self._left.pop(name, (self._burst, now_s))
        left = min(self._burst, left + (now_s - since_s) * self._per_s)
        allowed = left >= 1
        self._left[name] = (left - 1 if allowed else left, now_s)
        if len(self._left) > self._max_names:
            self._left.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._per_s
