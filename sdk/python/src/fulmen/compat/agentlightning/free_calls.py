"""Calls without a reward, found by when they ended."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fulmen.compat.agentlightning.exported_spans import SpanNode

__all__ = ["FreeCalls"]

# Behind every time, infinity as well.
_NEVER: Final = (math.inf, 1)


class FreeCalls:
    """Calls in the order in which they are added; the last one that ended by a time is found in O(log n) steps.

    A tree whose leaves are the ends of the calls that are free; each node above is the earliest of its two.

    Args:
        count: Calls that are added at most.
    """

    def __init__(self, count: int) -> None:
        self._calls: list[SpanNode] = []
        self._leaves = 1 << max(count - 1, 0).bit_length()
        self._earliest = [_NEVER] * (2 * self._leaves)

    def add(self, call: SpanNode) -> None:
        """Adds a call behind the others; one that ends at no number is never found."""
        self._calls.append(call)
        if not math.isnan(call.end_s):
            self._set(len(self._calls) - 1, (call.end_s, 0))

    def take(self, time_s: float) -> SpanNode | None:
        """Removes the last one that ended by a time, seconds since the epoch, and returns it; None without one."""
        wanted, index = (time_s, 0), 1
        if not self._earliest[index] <= wanted:
            return None
        while index < self._leaves:
            index = 2 * index + (self._earliest[2 * index + 1] <= wanted)
        self._set(index - self._leaves, _NEVER)
        return self._calls[index - self._leaves]

    def _set(self, place: int, end: tuple[float, int]) -> None:
        index = place + self._leaves
        self._earliest[index] = end
        while index := index // 2:
            self._earliest[index] = min(self._earliest[2 * index], self._earliest[2 * index + 1])
