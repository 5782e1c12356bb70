"""A count over the last minute, in slots of a few seconds.

Invariant: the sum is that of the present slot and the whole slots before it that reach back at least a minute. What is
held below a limit by it is below that limit in every minute, wherever the minute begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

SLOT_S: Final = 3.0
SLOTS: Final = 21
"""The present slot, and the twenty before it, which are a minute."""


class SlidingCount:
    """Counts by slot; times are slot numbers, which never go back."""

    __slots__ = ("_slots", "_total")

    def __init__(self) -> None:
        # Slot and count, oldest first; only slots in which something was counted.
        self._slots: deque[list[int]] = deque()
        self._total = 0

    def total(self, slot: int) -> int:
        """Returns the sum at a slot, and forgets what lies too far back."""
        slots = self._slots
        oldest = slot - SLOTS + 1
        while slots and slots[0][0] < oldest:
            self._total -= slots.popleft()[1]
        return self._total

    def add(self, slot: int, count: int) -> None:
        """Counts in the present slot."""
        slots = self._slots
        if slots and slots[-1][0] >= slot:
            slots[-1][1] += count
        else:
            slots.append([slot, count])
        self._total += count

    def correct(self, slot: int, count: int) -> None:
        """Changes what was counted in a slot, if it is not forgotten yet."""
        for known in reversed(self._slots):
            if known[0] <= slot:
                if known[0] == slot:
                    known[1] += count
                    self._total += count
                return

    def replace(self, slot: int, counts: Sequence[int]) -> None:
        """Takes counts by slot, newest first, the first of them of this slot."""
        newest_first = ([slot - age, count] for age, count in enumerate(counts[:SLOTS]) if count)
        self._slots = deque(reversed(list(newest_first)))
        self._total = sum(count for _, count in self._slots)

    def recent(self, slot: int) -> list[int]:
        """Returns the counts by slot, newest first, without the empty ones at the end."""
        self.total(slot)
        if not self._slots:
            return []
        counts = [0] * max(1, slot - self._slots[0][0] + 1)
        for known, count in self._slots:
            counts[max(0, slot - known)] += count
        return counts

    def entries(self) -> Iterable[tuple[int, int]]:
        """Returns slots and counts, oldest first."""
        return ((known, count) for known, count in self._slots)


def free_at_s(counts: Iterable[SlidingCount], excess: int) -> float:
    """Returns when so much of several counts together will have been forgotten, in seconds since 1970."""
    entries = sorted(entry for one in counts for entry in one.entries())
    for slot, count in entries:
        excess -= count
        if excess <= 0:
            return (slot + SLOTS) * SLOT_S
    return (entries[-1][0] + SLOTS) * SLOT_S if entries else 0.0
