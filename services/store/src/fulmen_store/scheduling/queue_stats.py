"""Cached queue statistics. Counts are kept, and their cost grows with the kinds of rollouts: many are read rarely."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Final

from fulmen_store.clock import Clock
from fulmen_store.scheduling.table import QueueStats, QueueStatsTable

__all__ = [
    "StatsCache",
]

# Counts cheaper than this are not cached.
CHEAP_S: Final = 0.05
TTL_PER_COST: Final = 20.0
ANSWERS_REMEMBERED: Final = 1000

Scope = tuple[int, int | None]


@dataclass(slots=True)
class _Answer:
    stats: QueueStats | None = None
    until: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class StatsCache:
    """Caches each count for a time proportional to its cost."""

    def __init__(self, table: QueueStatsTable, *, clock: Clock | None = None) -> None:
        self._table = table
        self._clock = (clock or Clock()).monotonic_s
        self._answers: dict[Scope, _Answer] = {}

    async def stats(self, project_id: int, run_id: int | None) -> QueueStats:
        """Counts rollouts, or returns a recent count.

        Raises:
            DatabaseUnavailable: If the rollouts cannot be counted.
        """
        if len(self._answers) >= ANSWERS_REMEMBERED and (project_id, run_id) not in self._answers:
            self._answers = {scope: answer for scope, answer in self._answers.items() if answer.lock.locked()}
        answer = self._answers.setdefault((project_id, run_id), _Answer())
        async with answer.lock:
            began = self._clock()
            if answer.stats is not None and began < answer.until:
                # Whether the queue is paused is known immediately.
                return replace(answer.stats, queue=await self._table.queue(project_id))
            answer.stats = await self._table.stats(project_id, run_id)
            now = self._clock()
            cost_s = now - began
            answer.until = now + (TTL_PER_COST * cost_s if cost_s > CHEAP_S else 0.0)
            return answer.stats
