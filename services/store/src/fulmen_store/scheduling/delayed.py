"""Items that may not run yet: after a back-off, or before their not-before time."""

from __future__ import annotations

import heapq
from typing import Final
from uuid import UUID

from fulmen_store.scheduling.fair_queue import ReadyItem

__all__ = ["DelayedItems"]

# What is due later is found in the table when its time comes.
HORIZON_S: Final = 600.0


class DelayedItems:
    """Holds items until they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ReadyItem]] = []
        self._ids: set[UUID] = set()

    def __len__(self) -> int:
        """Counts the items."""
        return len(self._heap)

    def __contains__(self, rollout_id: UUID) -> bool:
        """Tells whether a rollout is held here."""
        return rollout_id in self._ids

    def hold(self, item: ReadyItem, *, now: float, delay_s: float) -> None:
        """Holds an item for so many seconds; one that is held, or due far ahead, is left out."""
        if delay_s > HORIZON_S or item.rollout_id in self._ids:
            return
        self._ids.add(item.rollout_id)
        heapq.heappush(self._heap, (now + delay_s, item.rollout_id.int, item))

    def due(self, now: float) -> list[ReadyItem]:
        """Takes what is due, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, _, item = heapq.heappop(self._heap)
            self._ids.discard(item.rollout_id)
            found.append(item)
        return found

    def pause_s(self, now: float, longest_s: float) -> float:
        """Returns the seconds until the next one is due, at most `longest_s`."""
        return min(longest_s, max(0.0, self._heap[0][0] - now)) if self._heap else longest_s
