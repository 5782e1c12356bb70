"""Work stealing between replicas that share one backlog.

A replica refills its own share first. It steals other replicas' work only for credit that found no own work, after a
short delay in favour of the preferred replica, and from the far end of the page, which the preferred replica reaches
last. All of this is a hint: if two replicas choose the same item, one of them loses a claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from fulmen.ids import uuid7_unix_ms
from fulmen_store.clock import Clock
from fulmen_store.replicas.live_replicas import LiveReplicas
from fulmen_store.scheduling.fair_queue import ReadyItem

__all__ = ["WorkStealer"]

# About the time that the preferred replica needs to be notified, read and claim.
STEAL_DELAY_S: Final = 0.004
STEAL_BATCH: Final = 200
# Maximum lag of a share with slower runners behind the others.
LAG_LIMIT_MS: Final = 5_000


class WorkStealer:
    """Tracks the projects in which other replicas' work waits, and chooses the items to steal."""

    def __init__(self, replicas: LiveReplicas, *, clock: Clock) -> None:
        self._replicas = replicas
        self._clock = clock.monotonic_s
        self._projects: set[int] = set()
        self._steal_at = math.inf
        self._reach = 1

    def is_own(self, item: ReadyItem) -> bool:
        """Returns whether this replica is preferred for an item."""
        return self._rank_of(item) == 0

    def seen(self, project_id: int) -> None:
        """Records that other replicas' work waits in a project."""
        self._projects.add(project_id)
        if self._steal_at == math.inf:
            self._steal_at, self._reach = self._clock() + STEAL_DELAY_S, 1

    def projects(self) -> frozenset[int]:
        """Returns the projects in which other replicas' work waits."""
        return frozenset(self._projects)

    def nothing_fits(self) -> None:
        """Records that the chosen items cannot be assigned now; stealing is tried again after a poll."""
        self._projects.clear()
        self._steal_at = math.inf

    def steal_at(self) -> float:
        """Returns the monotonic time from which items may be stolen; infinity if none waits."""
        return self._steal_at

    def due(self) -> frozenset[int]:
        """Returns the projects from which to steal now."""
        return frozenset(self._projects) if self._clock() >= self._steal_at else frozenset()

    def overdue(self, page: Sequence[tuple[ReadyItem, float]]) -> list[ReadyItem]:
        """Returns other replicas' ready items that precede this replica's first one by more than the lag limit."""
        passed: list[ReadyItem] = []
        for item, delay_s in page:
            if self.is_own(item):
                born = uuid7_unix_ms(item.rollout_id)
                return [one for one in passed if born - uuid7_unix_ms(one.rollout_id) > LAG_LIMIT_MS]
            if delay_s <= 0:
                passed.append(item)
        return []

    def fitting(self, page: Sequence[tuple[ReadyItem, float]], fits: Callable[[ReadyItem], bool]) -> list[ReadyItem]:
        """Returns other replicas' ready items on a page that fit idle credit.

        Args:
            page: Waiting items of one project in order, each with its delay in seconds.
            fits: Predicate for items that fit idle credit.
        """
        return [item for item, delay_s in page if delay_s <= 0 and not self.is_own(item) and fits(item)]

    def choose(self, others: Sequence[ReadyItem], *, project_id: int, credit: int, more: bool) -> list[ReadyItem]:
        """Chooses the items to steal now from one project.

        Args:
            others: Items returned by `fitting`.
            project_id: Project of the items.
            credit: Amount of idle credit.
            more: Whether the project has waiting rows beyond the page.
        """
        if not others:
            self._forget(project_id)
            return []
        within = [item for item in others if self._rank_of(item) <= self._reach]
        if not within:
            self._reach += 1
            self._steal_at = self._clock() + STEAL_DELAY_S
            return []
        # Leave half to the preferred replica, whose runners may be waiting for it.
        count = min(max(credit, STEAL_BATCH), (len(within) + 1) // 2)
        if not more and len(others) == count:
            self._forget(project_id)
        return within[-count:]

    def _rank_of(self, item: ReadyItem) -> int:
        return self._replicas.rank(item.group_key or item.rollout_id)

    def _forget(self, project_id: int) -> None:
        self._projects.discard(project_id)
        if not self._projects:
            self._steal_at = math.inf
