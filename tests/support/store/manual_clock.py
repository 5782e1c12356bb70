"""A clock that stands still until a test moves it."""

from __future__ import annotations

from fulmen_store.clock import Clock

__all__ = ["ManualClock"]


class ManualClock(Clock):
    """Monotonic and Unix time are both `now_s`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s
