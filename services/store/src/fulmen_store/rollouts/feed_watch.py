"""Background role: looks for finished rollouts, once for all watchers of this replica.

A look is one statement that reads each new end once, however many watchers there are. It wakes those whose training run has
some; all others read nothing. Hints of ends trigger a poll immediately; regular polls find what no hint reported.

Invariant: an end is found by exactly one look, as each begins where the one before it ended: at the oldest running
transaction. Of a project that was not looked at before, all watchers are woken: what ended meanwhile is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from fulmen.errors import DatabaseUnavailable
from fulmen_store.rollouts.table import FeedTable
from fulmen_store.waiting import waited

__all__ = ["FeedWatch"]

# Ends of a project that a look reads; if there are more, all watchers of the project are woken.
MAX_ENDS: Final = 1000
# After a hint the end may be hidden briefly by another transaction: look again soon, then ever less often. It is also the
# pause between two looks, in which hints gather.
FIRST_PAUSE_S: Final = 0.005
PAUSE_GROWTH: Final = 2.0


class FeedWatch:
    """Wakes the watchers of the feed."""

    def __init__(self, *, table: FeedTable, poll_interval_s: float) -> None:
        """Creates the role; polling finds the ends that other replicas wrote."""
        self._table = table
        self._poll_interval_s = poll_interval_s
        self._watchers: dict[int, dict[int | None, set[asyncio.Event]]] = {}
        self._watched = asyncio.Event()
        self._hinted = asyncio.Event()
        self._bounds: dict[int, int] = {}
        self.lag_s = 0.0
        """For how long the oldest end that watchers may not see yet has waited, seconds."""

    @contextmanager
    def watching(self, project_id: int, run_id: int | None) -> Iterator[asyncio.Event]:
        """Yields an event that is set when a training run, or a project, may have new ends.

        Clear it before the feed is read, and wait for it after.
        """
        news = asyncio.Event()
        runs = self._watchers.setdefault(project_id, {})
        runs.setdefault(run_id, set()).add(news)
        self._watched.set()
        try:
            yield news
        finally:
            runs[run_id].discard(news)
            if not runs[run_id]:
                del runs[run_id]
            if not runs:
                del self._watchers[project_id]
            if not self._watchers:
                self._watched.clear()
                self.lag_s = 0.0

    def hint(self, projects: Iterable[int]) -> None:
        """Makes the role look soon if some of these projects, in which rollouts became final, have watchers."""
        if not self._watchers.keys().isdisjoint(projects):
            self._hinted.set()

    def wake_all(self) -> None:
        """Wakes all watchers so that they check for a shutdown."""
        for project_id in self._watchers:
            self._wake(project_id, None)

    async def run(self) -> None:
        """Looks until cancelled, while there are watchers."""
        growing_s = self._poll_interval_s
        while True:
            await self._watched.wait()
            pause_s = min(growing_s, self._poll_interval_s) if self.lag_s else self._poll_interval_s
            hinted = await waited(self._hinted, pause_s)
            self._hinted.clear()
            try:
                await self.look()
            except DatabaseUnavailable:
                self._bounds = {}
                self.lag_s = 0.0
            growing_s = FIRST_PAUSE_S if hinted else growing_s * PAUSE_GROWTH
            await asyncio.sleep(FIRST_PAUSE_S)

    async def look(self) -> None:
        """Looks once, and wakes the watchers with news.

        Raises:
            DatabaseUnavailable: If the feed cannot be read.
        """
        bounds = {project_id: self._bounds.get(project_id) for project_id in self._watchers}
        found = await self._table.news(bounds, limit=MAX_ENDS)
        self._bounds = {news.project_id: news.settled for news in found}
        self.lag_s = max((news.waited_s for news in found if news.waited_s is not None), default=0.0)
        for news in found:
            self._wake(news.project_id, None if bounds[news.project_id] is None else news.run_ids)

    def _wake(self, project_id: int, run_ids: Collection[int | None] | None) -> None:
        """Wakes the watchers of training runs, or of all if None, and the whole project's watchers if there is any
        news."""
        runs = self._watchers.get(project_id, {})
        woken = runs if run_ids is None else {None, *run_ids} & runs.keys() if run_ids else ()
        for run_id in woken:
            for news in runs[run_id]:
                news.set()
