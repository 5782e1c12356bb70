"""How many forged keys an address may show before it is told to wait.

Invariant: only keys that this deployment did not make count, so whoever has a good key is never held up by who shares
its address. One event loop owns the table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_ADDRESSES: Final = 10_000
_MINUTE_S: Final = 60.0


class FailedKeys:
    """A token bucket for each address that showed a forged key lately."""

    def __init__(self, *, per_minute: int, clock: Callable[[], float], max_addresses: int = MAX_ADDRESSES) -> None:
        """Creates an empty table.

        Args:
            per_minute: forged keys that an address may show at once, and per minute; 0: any number.
            clock: monotonic clock, in seconds.
            max_addresses: addresses that are remembered at most; the one that failed longest ago is forgotten first.
        """
        self._per_minute = per_minute
        self._clock = clock
        self._max_addresses = max_addresses
        # What is left of each bucket, and when that was: in the order of the last failure.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def failed(self, address: str) -> float:
        """Counts a forged key; returns the seconds after which another may be shown, 0 while there is room."""
        if not self._per_minute:
            return 0.0
        now_s, refill_per_s = self._clock(), self._per_minute / _MINUTE_S
        left, since_s = self._left.pop(address, (float(self._per_minute), now_s))
        left = min(self._per_minute, left + (now_s - since_s) * refill_per_s)
        allowed = left >= 1
        self._left[address] = (left - 1 if allowed else left, now_s)
        if len(self._left) > self._max_addresses:
            self._left.popitem(last=False)
        return 0.0 if allowed else (1 - left) / refill_per_s
