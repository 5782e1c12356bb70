"""Rate limit of forged keys by address.

Invariant: only forged keys count, so a valid key is never rejected because of others behind the same address. Not
thread-safe: use it on one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_ADDRESSES: Final = 10_000
_MINUTE_S: Final = 60.0


class FailedKeys:
    """A token bucket for each address that has recently sent a forged key."""

    def __init__(self, *, per_minute: int, clock: Callable[[], float], max_addresses: int = MAX_ADDRESSES) -> None:
        """Initializes an empty table.

        Args:
            per_minute: Burst, and forged keys per minute, of an address; 0 for no limit.
            clock: Monotonic clock, in seconds.
            max_addresses: Size of the table; the least recently failed address is dropped first.
        """
        self._per_minute = per_minute
        self._clock = clock
        self._max_addresses = max_addresses
        # Remaining tokens and time of each bucket, ordered by the last failure.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def failed(self, address: str) -> float:
        """Counts a forged key; returns the time to wait in seconds, 0 if within the limit."""
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
