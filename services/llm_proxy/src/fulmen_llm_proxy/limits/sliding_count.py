"""A sliding-window count of the last minute, in slots of a few seconds.

Invariant: the total covers the current slot and the full slots before it, which span at least a minute. A count kept
below a limit is therefore below it in every minute, wherever the minute starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

SLOT_S: Final = 3.0
SLOTS: Final = 21
"""The current slot and the twenty before it, which span a minute."""


class SlidingCount:
    """Counts by slot number; slot numbers never decrease."""

    __slots__ = ("_slots", "_total")

    def __init__(self) -> None:
        # Pairs of slot and count, oldest first, without empty slots.
        self._slots: deque[list[int]] = deque()
        self._total = 0

    def total(self, slot: int) -> int:
        """Returns the total at a slot, and drops older slots."""
        slots = self._slots
        oldest = slot - SLOTS + 1
        while slots and slots[0][0] < oldest:
            self._total -= slots.popleft()[1]
        return self._total

    def add(self, slot: int, count: int) -> None:
        """Adds to the current slot."""
        slots = self._slots
        if slots and slots[-1][0] >= slot:
            slots[-1][1] += count
        else:
            slots.append([slot, count])
        self._total += count

    def correct(self, slot: int, count: int) -> None:
        """Adjusts the count of an earlier slot if it is still in the window."""
        for known in reversed(self._slots):
            if known[0] <= slot:
                if known[0] == slot:
                    known[1] += count
                    self._total += count
                return

    def replace(self, slot: int, counts: Sequence[int]) -> None:
        """Replaces all counts; `counts` are by slot, newest first, starting with this slot."""
        newest_first = ([slot - age, count] for age, count in enumerate(counts[:SLOTS]) if count)
        self._slots = deque(reversed(list(newest_first)))
        self._total = sum(count for _, count in self._slots)

    def recent(self, slot: int) -> list[int]:
        """Returns the counts by slot, newest first, without trailing empty slots."""
        self.total(slot)
        if not self._slots:
            return []
        counts = [0] * max(1, slot - self._slots[0][0] + 1)
        for known, count in self._slots:
            counts[max(0, slot - known)] += count
        return counts

    def entries(self) -> Iterable[tuple[int, int]]:
        """Returns pairs of slot and count, oldest first."""
        return ((known, count) for known, count in self._slots)


def free_at_s(counts: Iterable[SlidingCount], excess: int) -> float:
    """Returns when `excess` of the combined counts will have left the window, seconds since 1970."""
    entries = sorted(entry for one in counts for entry in one.entries())
    for slot, count in entries:
        excess -= count
        if excess <= 0:
            return (slot + SLOTS) * SLOT_S
    return (entries[-1][0] + SLOTS) * SLOT_S if entries else 0.0
