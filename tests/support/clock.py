"""A clock that stands still until a test moves it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass
class Clock:
    """Returns `now_s` when it is called."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
