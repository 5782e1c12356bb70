"""The waiting work of one replica, in memory, in the order in which it is handed out.

Order: lowest rank (highest priority) first; within a rank, projects by stride scheduling (Waldspurger and
Weihl, 1995), so that over any window two backlogged projects get work in the ratio of their weights;
within a project, oldest id first. The queue is a hint: the row in the database decides who gets an item.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from uuid import UUID

__all__ = ["FairQueue", "ReadyItem"]

Labels = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyItem:
    """A rollout that may run.

    Attributes:
        rollout_id: its id, a UUIDv7.
        project_id: the database's number of its project.
        rank: the negated priority; lower goes first.
        labels: `key=value` strings that the runner must have.
    """

    rollout_id: UUID
    project_id: int
    rank: int = 0
    labels: Labels = frozenset()


@dataclass(slots=True)
class _Line:
    """One project's waiting items of one rank, a heap for each set of required labels."""

    stride_pass: float
    heaps: dict[Labels, list[tuple[int, ReadyItem]]] = field(default_factory=dict)

    def push(self, item: ReadyItem) -> None:
        heapq.heappush(self.heaps.setdefault(item.labels, []), (item.rollout_id.int, item))

    def best(self, offered: Labels) -> Labels | None:
        eligible = [labels for labels in self.heaps if labels <= offered]
        if len(eligible) < 2:
            return eligible[0] if eligible else None
        return min(eligible, key=lambda labels: self.heaps[labels][0][0])

    def pop(self, labels: Labels) -> ReadyItem:
        heap = self.heaps[labels]
        _, item = heapq.heappop(heap)
        if not heap:
            del self.heaps[labels]
        return item


class FairQueue:
    """Holds ready items and hands out the next one that a runner qualifies for."""

    def __init__(self, weight_of: Callable[[int], float] = lambda _project_id: 1.0) -> None:
        """Takes the function that knows each project's weight."""
        self._weight_of = weight_of
        self._ranks: list[int] = []
        self._lines: dict[int, dict[int, _Line]] = {}
        self._served: dict[int, dict[int, float]] = {}
        self._ids: set[UUID] = set()
        self._per_project: dict[int, int] = {}

    def __len__(self) -> int:
        """Counts the waiting items."""
        return len(self._ids)

    def __contains__(self, rollout_id: UUID) -> bool:
        """Tells whether a rollout waits here."""
        return rollout_id in self._ids

    def count_of(self, project_id: int) -> int:
        """Counts the waiting items of one project."""
        return self._per_project.get(project_id, 0)

    def push(self, item: ReadyItem) -> None:
        """Adds an item; one that is already there is left as it is."""
        if item.rollout_id in self._ids:
            return
        self._ids.add(item.rollout_id)
        self._per_project[item.project_id] = self._per_project.get(item.project_id, 0) + 1
        lines = self._lines.get(item.rank)
        if lines is None:
            lines = self._lines[item.rank] = {}
            insort(self._ranks, item.rank)
        line = lines.get(item.project_id)
        if line is None:
            # A newcomer, or one that was away, begins where the others are: it neither lags nor owes.
            floor = min((other.stride_pass for other in lines.values()), default=0.0)
            own = self._served.get(item.rank, {}).get(item.project_id, 0.0)
            line = lines[item.project_id] = _Line(stride_pass=max(floor, own))
        line.push(item)

    def pop(self, offered: Labels = frozenset(), projects: Iterable[int] | None = None) -> ReadyItem | None:
        """Takes the next item that a runner with these labels may run; None if there is none.

        Args:
            offered: the runner's labels.
            projects: the projects that the runner serves; None means all.
        """
        allowed = None if projects is None else frozenset(projects)
        for rank in self._ranks:
            item = self._pop_rank(rank, offered, allowed)
            if item is not None:
                return item
        return None

    def _pop_rank(self, rank: int, offered: Labels, allowed: frozenset[int] | None) -> ReadyItem | None:
        lines = self._lines[rank]
        chosen: tuple[float, int, Labels] | None = None
        for project_id, line in lines.items():
            if allowed is not None and project_id not in allowed:
                continue
            if chosen is not None and (line.stride_pass, project_id) >= chosen[:2]:
                continue
            labels = line.best(offered)
            if labels is not None:
                chosen = (line.stride_pass, project_id, labels)
        if chosen is None:
            return None
        return self._take(rank, chosen[1], chosen[2])

    def _take(self, rank: int, project_id: int, labels: Labels) -> ReadyItem:
        lines = self._lines[rank]
        line = lines[project_id]
        item = line.pop(labels)
        line.stride_pass += 1.0 / self._weight_of(project_id)
        self._ids.discard(item.rollout_id)
        self._per_project[project_id] -= 1
        if not line.heaps:
            del lines[project_id]
            served = self._served.setdefault(rank, {})
            served[project_id] = line.stride_pass
            if not lines:
                del self._lines[rank]
                self._ranks.remove(rank)
                # Nobody waits: nobody owes anything.
                self._served.pop(rank, None)
        return item
