"""The store's clock, as this process knows it: by it all processes cut minutes at the same moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

TOLERANCE_S: Final = 0.25
"""Differences below are taken for the way between store and proxy."""


class StoreClock:
    """Goes on by the monotonic clock from what the store said last; until then from the machine's own time."""

    def __init__(self, *, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """Takes seconds since 1970, and monotonic seconds."""
        self._monotonic = monotonic
        self._ahead_s = wall() - monotonic()

    def now(self) -> float:
        """Returns seconds since 1970."""
        return self._monotonic() + self._ahead_s

    def hear(self, store_s: float, *, sent: float, received: float) -> bool:
        """Takes what the store said between two moments of the monotonic clock; tells whether this one was set back."""
        ahead_s = store_s - (sent + received) / 2
        step_s = ahead_s - self._ahead_s
        if abs(step_s) <= TOLERANCE_S + (received - sent) / 2:
            return False
        self._ahead_s = ahead_s
        return step_s < 0
