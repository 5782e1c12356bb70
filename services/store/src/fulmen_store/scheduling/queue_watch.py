"""Statistics of queues for watchers: a queue's watchers share one count per second, and get it when it has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fulmen_store.looks import Looked, Looks
from fulmen_store.scheduling.fair_queue import Labels
from fulmen_store.scheduling.queue_stats import StatsCache
from fulmen_store.scheduling.table import QueueStats

__all__ = ["QueueWatch", "SeenQueue"]

PAUSE_S: Final = 1.0
KEEP_ALIVE_S: Final = 15.0

Scope = tuple[int, str]
"""Number of a project, and the name of a training run; empty for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenQueue:
    """A queue at one moment.

    Attributes:
        stats: Its statistics.
        open_credit: Unused credit of the runners that are connected to this replica.
        unmatched: Labels of waiting rollouts that none of these runners has, with their counts.
    """

    stats: QueueStats
    open_credit: int
    unmatched: Sequence[tuple[Labels, int]]

    def without_ages(self) -> SeenQueue:
        """Returns it without what changes as time passes."""
        ageless = [replace(each, oldest_age_s=None) for each in self.stats.priorities]
        return replace(self, stats=replace(self.stats, priorities=ageless))


class QueueWatch:
    """Follows queues for watchers."""

    def __init__(
        self,
        *,
        stats: StatsCache,
        open_credit: Callable[[int], int],
        unmatched: Callable[[int], Sequence[tuple[Labels, int]]],
        find_run: Callable[[int, str], Awaitable[int]],
        stopping: asyncio.Event,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Creates the watch.

        Args:
            stats: Counts rollouts.
            open_credit: Returns the unused credit of a project's runners at this replica.
            unmatched: Returns the labels that a project's waiting rollouts require and no runner at this replica has.
            find_run: Returns the number of a training run of a project.
            stopping: Ends all watches.
            pause_s: Pause between two counts of a queue, seconds.
        """
        self._stats = stats
        self._open_credit = open_credit
        self._unmatched = unmatched
        self._find_run = find_run
        self._stopping = stopping
        self._looks: Looks[Scope, SeenQueue] = Looks(self._look, pause_s=pause_s, stopping=stopping)

    async def follow(self, project_id: int, training_run: str = "") -> AsyncGenerator[SeenQueue, None]:
        """Yields the current queue immediately, then whenever it has changed, and at least every 15 s, until the
        shutdown.

        Of several changes while a watcher is slow, it gets the last state.

        Raises:
            DatabaseUnavailable: If the queue could not be counted.
        """
        clock = asyncio.get_running_loop().time
        with self._looks.watching((project_id, training_run)) as shared:
            number, due_s = 0, clock() + KEEP_ALIVE_S
            while not self._stopping.is_set():
                await shared.wait(number, due_s - clock())
                if shared.seen is not None and (shared.number != number or clock() >= due_s):
                    number, due_s = shared.number, clock() + KEEP_ALIVE_S
                    yield shared.seen

    async def _look(self, scope: Scope, last: SeenQueue | None) -> Looked[SeenQueue]:
        project_id, training_run = scope
        run_id = await self._find_run(project_id, training_run) if training_run else None
        seen = SeenQueue(
            stats=await self._stats.stats(project_id, run_id),
            open_credit=self._open_credit(project_id),
            unmatched=self._unmatched(project_id),
        )
        return Looked(seen=seen, is_news=last is None or seen.without_ages() != last.without_ages())
