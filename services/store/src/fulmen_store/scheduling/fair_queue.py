"""The waiting items of one replica, in memory, in dispatch order.

Within a project, items are ordered by sort_priority (the negated priority), which improves by one per ageing interval
waited, then by age. Both combine into one constant, `since + sort_priority * interval`, so ageing never reorders the
heap.

Between projects, the best level is served first. Within a level, stride scheduling (Waldspurger and Weihl, 1995) serves
two backlogged projects in the ratio of their weights over any window. A project's level is the aged sort_priority of
its next item, but ageing never raises it above the best sort_priority that waits in any project: otherwise the project
with the older backlog would be served alone until it had caught up, whatever the weights. With ageing, every project
eventually reaches that level, so none starves.

The queue is a hint: the row in the database decides who gets an item.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from math import ceil
from typing import Final
from uuid import UUID

from fulmen_store.clock import Clock
from fulmen_store.scheduling.rules import DEFAULT_TERMS, QueueTerms

__all__ = ["FairQueue", "Labels", "ReadyItem", "waits_since"]

Labels = frozenset[str]

UNIX_MS_SHIFT: Final = 80
MAX_SORT_PRIORITY: Final = 32767
# Ids may come from clients. A run-at time this close to the time in the id means that the item was not delayed.
CLOCK_TOLERANCE_S: Final = 60.0


# Treated as immutable, but not frozen: one is created for every rollout, and freezing makes that four times slower.
@dataclass(slots=True, kw_only=True)
class ReadyItem:
    """A rollout that may run.

    Attributes:
        rollout_id: Its id, a UUIDv7.
        project_id: Database number of its project.
        sort_priority: Negated priority; lower is first.
        labels: `key=value` strings that the runner must have.
        group_key: Key of its group; None if it has none.
        task_type: Number of its task type; None if it has none.
        agent: Number of its agent's version; None if it names none.
        request_bytes: Size of its request.
        runs_alone: Whether it must be the only rollout on its runner, because runners died while they ran it.
        since_s: Unix time since which it waits, seconds; None if it is the time in its id.
    """

    rollout_id: UUID
    project_id: int
    sort_priority: int = 0
    labels: Labels = frozenset()
    group_key: UUID | None = None
    task_type: int | None = None
    agent: int | None = None
    request_bytes: int = 0
    runs_alone: bool = False
    since_s: float | None = None

    @property
    def waiting_since_s(self) -> float:
        """Unix time since which it waits, seconds."""
        return (self.rollout_id.int >> UNIX_MS_SHIFT) / 1000 if self.since_s is None else self.since_s

    @property
    def max_affinity(self) -> int:
        """Maximum of `RunnerStream.affinity` for this item."""
        return 2 if self.group_key is not None else int(self.agent is not None)


def waits_since(rollout_id: UUID, run_at_s: float | None) -> float | None:
    """Returns `since_s` of an item with a run-at time, Unix seconds; None means immediately."""
    if run_at_s is None or run_at_s <= (rollout_id.int >> UNIX_MS_SHIFT) / 1000 + CLOCK_TOLERANCE_S:
        return None
    return run_at_s


_Entry = tuple[float, int, ReadyItem]
_Members = dict[int | None, list[tuple[int, ReadyItem]]]


@dataclass(slots=True, kw_only=True)
class _Subqueue:
    """A project's waiting items with the same required labels, of those that run alone or of the others.

    The heap has one entry per item. The members of a group share their entries: the member to run is chosen when an
    entry is popped.
    """

    labels: Labels
    runs_alone: bool = False
    heap: list[_Entry] = field(default_factory=list)
    priorities: dict[int, int] = field(default_factory=dict)
    best_sort_priority: int = 0
    groups: dict[tuple[UUID, int], _Members] = field(default_factory=dict)

    def push(self, key: float, item: ReadyItem) -> None:
        heapq.heappush(self.heap, (key, item.rollout_id.int, item))
        if item.sort_priority not in self.priorities:
            self.priorities[item.sort_priority] = 0
            self.best_sort_priority = min(self.priorities)
        self.priorities[item.sort_priority] += 1
        if item.group_key is not None:
            members = self.groups.setdefault((item.group_key, item.sort_priority), {})
            heapq.heappush(members.setdefault(item.task_type, []), (item.rollout_id.int, item))

    def pop(self, predicted_s: Callable[[int | None], float] | None) -> ReadyItem:
        _, _, item = heapq.heappop(self.heap)
        if item.group_key is not None:
            item = self._take_member((item.group_key, item.sort_priority), predicted_s)
        left = self.priorities[item.sort_priority] - 1
        if left:
            self.priorities[item.sort_priority] = left
        else:
            del self.priorities[item.sort_priority]
            self.best_sort_priority = min(self.priorities, default=0)
        return item

    def _take_member(self, group: tuple[UUID, int], predicted_s: Callable[[int | None], float] | None) -> ReadyItem:
        members = self.groups[group]
        if len(members) == 1:
            (task_type,) = members
        elif predicted_s is None:
            task_type = min(members, key=lambda one: members[one][0][0])
        else:
            task_type = min(members, key=lambda one: (-predicted_s(one), members[one][0][0]))
        _, item = heapq.heappop(members[task_type])
        if not members[task_type]:
            del members[task_type]
            if not members:
                del self.groups[group]
        return item


@dataclass(slots=True)
class _ProjectQueue:
    """One project's waiting items, with the terms used on the hot path."""

    project_id: int
    terms: InitVar[QueueTerms]
    interval_s: float = 0.0
    turn: float = 0.0
    anyone: bool = False
    is_paused: bool = False
    subqueues: dict[tuple[Labels, bool], _Subqueue] = field(default_factory=dict)
    count: int = 0
    level: int | None = None

    def __post_init__(self, terms: QueueTerms) -> None:
        self.learn(terms)

    def learn(self, terms: QueueTerms) -> None:
        self.turn = 1.0 / terms.share
        self.anyone = not terms.rules.match_labels
        self.is_paused = terms.is_paused
        if self.interval_s != terms.rules.ageing_interval_s:
            self.interval_s = terms.rules.ageing_interval_s
            items = self.items()
            self.subqueues, self.count = {}, 0
            for item in items:
                self.push(item)

    def items(self) -> list[ReadyItem]:
        return [item for subqueue in self.subqueues.values() for _, _, item in subqueue.heap]

    def push(self, item: ReadyItem) -> None:
        subqueue = self.subqueues.get((item.labels, item.runs_alone))
        if subqueue is None:
            subqueue = _Subqueue(labels=item.labels, runs_alone=item.runs_alone)
            self.subqueues[item.labels, item.runs_alone] = subqueue
        interval_s = self.interval_s
        subqueue.push(
            item.waiting_since_s + item.sort_priority * interval_s if interval_s else float(item.sort_priority), item
        )
        self.count += 1

    def best(self, offered: Labels, *, alone: bool) -> _Subqueue | None:
        """Returns the subqueue with the first head among those that the labels allow; None if they allow none."""
        found: _Subqueue | None = None
        for subqueue in self.subqueues.values():
            if self._allows(subqueue, offered, alone) and (found is None or subqueue.heap[0] < found.heap[0]):
                found = subqueue
        return found

    def best_sort_priority(self, offered: Labels, *, alone: bool) -> int:
        """Returns the best sort_priority among the items that the labels allow."""
        return min(
            subqueue.best_sort_priority
            for subqueue in self.subqueues.values()
            if self._allows(subqueue, offered, alone)
        )

    def _allows(self, subqueue: _Subqueue, offered: Labels, alone: bool) -> bool:
        return subqueue.runs_alone is alone and (self.anyone or subqueue.labels <= offered)

    def take(self, subqueue: _Subqueue, predicted_s: Callable[[int | None], float] | None) -> ReadyItem:
        item = subqueue.pop(predicted_s)
        self.count -= 1
        if not subqueue.heap:
            del self.subqueues[subqueue.labels, subqueue.runs_alone]
        return item


class FairQueue:
    """Holds ready items and returns the next one that a runner qualifies for."""

    def __init__(
        self,
        *,
        predicted_s: Callable[[int | None], float] = lambda _task_type: 0.0,
        clock: Clock | None = None,
    ) -> None:
        """Creates an empty queue.

        Args:
            predicted_s: Predicted duration of an attempt by task type, seconds; by default unknown.
            clock: Clock; by default the system's.
        """
        self._predicted_s = predicted_s
        self._now_s = (clock or Clock()).unix_s
        self._terms: dict[int, QueueTerms] = {}
        self._queues: dict[int, _ProjectQueue] = {}
        self._allowed: dict[int, int] = {}
        # Stride passes by level and project; a pass grows by 1 / share with each dispatched item.
        self._passes: dict[int, dict[int, float]] = {}
        self._ids: set[UUID] = set()
        self._alone: set[UUID] = set()

    def __len__(self) -> int:
        """Returns the number of waiting items."""
        return len(self._ids)

    def __contains__(self, rollout_id: UUID) -> bool:
        """Returns whether a rollout waits here."""
        return rollout_id in self._ids

    def count_of(self, project_id: int) -> int:
        """Returns the number of waiting items of one project."""
        queue = self._queues.get(project_id)
        return queue.count if queue is not None else 0

    def terms_of(self, project_id: int) -> QueueTerms:
        """Returns the terms by which a project is served here."""
        return self._terms.get(project_id, DEFAULT_TERMS)

    def count_by_labels(self, project_id: int) -> Mapping[Labels, int]:
        """Counts a project's waiting items by their required labels."""
        queue = self._queues.get(project_id)
        counts: dict[Labels, int] = {}
        for subqueue in () if queue is None else queue.subqueues.values():
            counts[subqueue.labels] = counts.get(subqueue.labels, 0) + len(subqueue.heap)
        return counts

    @property
    def has_alone(self) -> bool:
        """Whether items wait that run alone on their runner."""
        return bool(self._alone)

    def learn(self, project_id: int, terms: QueueTerms) -> None:
        """Applies new terms to a project; drops the items of paused agents."""
        if self.terms_of(project_id) == terms:
            return
        self._terms[project_id] = terms
        self._allowed.pop(project_id, None)
        queue = self._queues.get(project_id)
        if queue is None:
            return
        queue.learn(terms)
        if terms.paused_agents:
            items = queue.items()
            self.forget(project_id)
            for item in items:
                self.push(item)

    def allow(self, project_id: int, count: int) -> None:
        """Limits the number of further items of a project; unlimited by default."""
        self._allowed[project_id] = count

    def allow_more(self, project_id: int, count: int) -> bool:
        """Raises the limit of a project; returns whether it has one."""
        if project_id not in self._allowed:
            return False
        self._allowed[project_id] += count
        return True

    def allow_at_least(self, count: int) -> None:
        """Raises the limits of all limited projects to at least `count`."""
        for project_id, allowed in self._allowed.items():
            self._allowed[project_id] = max(allowed, count)

    def push(self, item: ReadyItem) -> None:
        """Adds an item unless it is already in the queue, or its agent is paused."""
        if item.rollout_id in self._ids or item.agent in self.terms_of(item.project_id).paused_agents:
            return
        self._ids.add(item.rollout_id)
        if item.runs_alone:
            self._alone.add(item.rollout_id)
        queue = self._queues.get(item.project_id)
        if queue is None:
            terms = self.terms_of(item.project_id)
            queue = self._queues[item.project_id] = _ProjectQueue(item.project_id, terms)
        queue.push(item)

    def forget(self, project_id: int) -> None:
        """Drops a project's outdated waiting items."""
        queue = self._queues.pop(project_id, None)
        if queue is not None:
            ids = {item.rollout_id for item in queue.items()}
            self._ids -= ids
            self._alone -= ids
            if not self._queues:
                self._passes.clear()

    def pop(
        self, offered: Labels = frozenset(), projects: Iterable[int] | None = None, *, alone: bool = False
    ) -> ReadyItem | None:
        """Removes and returns the next item that a runner with these labels may run, or None.

        Args:
            offered: Runner's labels.
            projects: Projects that the runner serves; None means all.
            alone: Whether to return one of the items that run alone, or one of the others.
        """
        candidates = self._candidates(offered, projects, alone=alone)
        if not candidates:
            return None
        queue, subqueue = candidates[0] if len(self._queues) == 1 else self._fairest(candidates, offered)
        item = queue.take(subqueue, self._predicted_s if self.terms_of(queue.project_id).rules.longest_first else None)
        self._ids.discard(item.rollout_id)
        self._alone.discard(item.rollout_id)
        if item.project_id in self._allowed:
            self._allowed[item.project_id] -= 1
        if not queue.count:
            del self._queues[queue.project_id]
            if not self._queues:
                # Passes do not outlive a backlog.
                self._passes.clear()
        return item

    def has_alone_for(self, offered: Labels, projects: Iterable[int] | None) -> bool:
        """Returns whether an item waits that would run alone on a runner with these labels and projects."""
        return bool(self._alone) and bool(self._candidates(offered, projects, alone=True))

    def _candidates(
        self, offered: Labels, projects: Iterable[int] | None, *, alone: bool
    ) -> list[tuple[_ProjectQueue, _Subqueue]]:
        candidates: list[tuple[_ProjectQueue, _Subqueue]] = []
        for project_id, queue in self._queues.items():
            is_served = projects is None or project_id in projects
            if is_served and not queue.is_paused and self._allowed.get(project_id, 1) > 0:
                subqueue = queue.best(offered, alone=alone)
                if subqueue is not None:
                    candidates.append((queue, subqueue))
        return candidates

    def _fairest(
        self, candidates: list[tuple[_ProjectQueue, _Subqueue]], offered: Labels
    ) -> tuple[_ProjectQueue, _Subqueue]:
        at_level, level = self._at_best_level(candidates, offered)
        passes = self._passes.get(level)
        if passes is None:
            passes = self._passes[level] = {}
        for queue, _ in at_level:
            if queue.level != level:
                self._enter(level, passes, [one for one, _ in at_level if one.level != level])
                break
        chosen = at_level[0]
        lowest = passes[chosen[0].project_id]
        for candidate in at_level:
            own = passes[candidate[0].project_id]
            if own < lowest:
                chosen, lowest = candidate, own
        passes[chosen[0].project_id] = lowest + chosen[0].turn
        return chosen

    def _at_best_level(
        self, candidates: list[tuple[_ProjectQueue, _Subqueue]], offered: Labels
    ) -> tuple[list[tuple[_ProjectQueue, _Subqueue]], int]:
        now_s = self._now_s()
        best_sort_priority = MAX_SORT_PRIORITY
        for queue, subqueue in candidates:
            own = subqueue.best_sort_priority
            if len(queue.subqueues) > 1:
                own = queue.best_sort_priority(offered, alone=subqueue.runs_alone)
            if own < best_sort_priority:
                best_sort_priority = own
        level, at_level = MAX_SORT_PRIORITY, []
        for candidate in candidates:
            queue, subqueue = candidate
            key, _, item = subqueue.heap[0]
            own = item.sort_priority
            if own > best_sort_priority and queue.interval_s:
                own = max(best_sort_priority, min(own, ceil((key - now_s) / queue.interval_s)))
            if own < level:
                level, at_level = own, [candidate]
            elif own == level:
                at_level.append(candidate)
        return at_level, level

    def _enter(self, level: int, passes: dict[int, float], newcomers: list[_ProjectQueue]) -> None:
        """Adds projects to a level, each with a pass at most one turn away from those of its members."""
        members = [passes[queue.project_id] for queue in self._queues.values() if queue.level == level]
        own = {queue.project_id: passes.get(queue.project_id, 0.0) for queue in newcomers}
        for queue in newcomers:
            low = min(members) if members else max(own.values()) - queue.turn
            high = (max(members) if members else max(own.values())) + queue.turn
            passes[queue.project_id] = min(max(own[queue.project_id], low), high)
            queue.level = level
