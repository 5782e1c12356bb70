"""Which waiting work this replica takes, when several have the same backlog before them.

A replica refills its own share first. Others' work it takes only for credit that found nothing of its own, a moment
after it saw that there is any, so that the preferred replica comes first; then from the far end of the page, where the
preferred replica arrives last. All of it is a hint: two replicas that choose alike cost one of them a lost claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from fulmen.ids import uuid7_unix_ms
from fulmen_store.scheduling.fair_queue import ReadyItem

__all__ = ["WorkStealer"]

# About as long as the preferred replica needs to hear, look and claim.
STEAL_DELAY_S: Final = 0.004
STEAL_BATCH: Final = 200
# A share whose runners are slower falls behind the others by no more than this.
LAG_LIMIT_MS: Final = 5_000


class WorkStealer:
    """Knows in which projects work of others waits, and chooses what to take of it."""

    def __init__(self, place: Callable[[UUID], int], *, clock: Callable[[], float]) -> None:
        """Takes the function that counts the replicas preferred to this one, and monotonic seconds."""
        self._place = place
        self._clock = clock
        self._projects: set[int] = set()
        self._look_at = math.inf
        self._reach = 1

    def is_own(self, item: ReadyItem) -> bool:
        """Tells whether this replica is preferred for an item."""
        return self._place_of(item) == 0

    def seen(self, project_id: int) -> None:
        """Notes that work of others waits in a project."""
        self._projects.add(project_id)
        if self._look_at == math.inf:
            self._look_at, self._reach = self._clock() + STEAL_DELAY_S, 1

    def projects(self) -> frozenset[int]:
        """Returns the projects in which work of others waits."""
        return frozenset(self._projects)

    def nothing_fits(self) -> None:
        """Notes that what was chosen cannot be handed out here now: the next look is the poll's."""
        self._projects.clear()
        self._look_at = math.inf

    def look_at(self) -> float:
        """Returns the time at which others' work may be taken; infinity if there is none."""
        return self._look_at

    def due(self) -> frozenset[int]:
        """Returns the projects in which to look now for others' work."""
        return frozenset(self._projects) if self._clock() >= self._look_at else frozenset()

    def overdue(self, page: Sequence[tuple[ReadyItem, float]]) -> list[ReadyItem]:
        """Returns others' ready items that wait before this replica's first one, and have for too long."""
        passed: list[ReadyItem] = []
        for item, delay_s in page:
            if self.is_own(item):
                born = uuid7_unix_ms(item.rollout_id)
                return [one for one in passed if born - uuid7_unix_ms(one.rollout_id) > LAG_LIMIT_MS]
            if delay_s <= 0:
                passed.append(item)
        return []

    def fitting(self, page: Sequence[tuple[ReadyItem, float]], fits: Callable[[ReadyItem], bool]) -> list[ReadyItem]:
        """Returns others' ready items on a page of the table that idle credit can be used for.

        Args:
            page: waiting items of one project in order, each with the seconds until it may run.
            fits: tells whether an item fits idle credit.
        """
        return [item for item, delay_s in page if delay_s <= 0 and not self.is_own(item) and fits(item)]

    def choose(self, others: Sequence[ReadyItem], *, project_id: int, credit: int, more: bool) -> list[ReadyItem]:
        """Chooses what to take now of the fitting work of others in a project.

        Args:
            others: what `fitting` found.
            project_id: the project.
            credit: how much credit is idle.
            more: whether the project has waiting work beyond the page that was looked at.
        """
        if not others:
            self._forget(project_id)
            return []
        within = [item for item in others if self._place_of(item) <= self._reach]
        if not within:
            self._reach += 1
            self._look_at = self._clock() + STEAL_DELAY_S
            return []
        # Half of it at most: the other half is on its way to the preferred replica's runners, if it has any that wait.
        count = min(max(credit, STEAL_BATCH), (len(within) + 1) // 2)
        if not more and len(others) == count:
            self._forget(project_id)
        return within[-count:]

    def _place_of(self, item: ReadyItem) -> int:
        return self._place(item.group_key or item.rollout_id)

    def _forget(self, project_id: int) -> None:
        self._projects.discard(project_id)
        if not self._projects:
            self._look_at = math.inf
