"""The backlog: the waiting rows of the table that this replica knows.

Invariant: every waiting row is either known here (in the queue, among the delayed items, or noted as work of other
replicas) or in the range that the next refills read. A refill continues where the project's previous one ended and
wraps around at the end of the table, so rows that no runner here can use never hide others. All of this is a hint: the
row decides who gets an item.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final
from uuid import UUID

from fulmen_store.clock import Clock
from fulmen_store.leases.leases import LeaseTable, Project
from fulmen_store.replicas.live_replicas import LiveReplicas
from fulmen_store.scheduling.durations import DurationTracker
from fulmen_store.scheduling.fair_queue import FairQueue, Labels, ReadyItem
from fulmen_store.scheduling.runner_streams import RunnerStreams
from fulmen_store.scheduling.work_stealing import WorkStealer

__all__ = [
    "Backlog",
    "DelayedItems",
]

REFILL_PAGE: Final = 1000
OLDEST_PER_PRIORITY: Final = 100
MAX_REFILL_PAGES: Final = 10
LOW_WATER: Final = 500
HEAD_PAGE: Final = 200
MAX_HEADS: Final = 64
WINDOW_PER_PROJECT: Final = 50_000
# Beyond the window, only items that fit waiting credit are kept.
WINDOW_MARGIN: Final = REFILL_PAGE
READ_AGAIN_INTERVAL_S: Final = 0.05

Position = tuple[int, UUID]
BEFORE_ALL: Final[Position] = (-32768, UUID(int=0))


@dataclass(slots=True)
class _Reading:
    """Progress of reading the waiting rows of one project.

    Attributes:
        position: Where the next refill continues.
        whole: Whether all rows were read since the last change; polls then only find rows whose notification was lost.
        left_out: Whether rows were skipped for lack of room since the last wrap-around.
    """

    position: Position = BEFORE_ALL
    whole: bool = False
    left_out: bool = False
    _changes: int = 0
    _changes_at_start: int = 0

    def begin(self) -> None:
        if self.position == BEFORE_ALL:
            self._changes_at_start = self._changes

    def end(self) -> None:
        self.whole = self._changes == self._changes_at_start
        self.position, self.left_out = BEFORE_ALL, False

    def change(self) -> None:
        self._changes += 1
        if self.whole:
            self.whole, self.position = False, BEFORE_ALL


class Backlog:
    """Holds the known waiting items and reads the rest from the table.

    Attributes:
        ready: Items that may run, in dispatch order.
        projects: Projects by number.
    """

    def __init__(
        self,
        *,
        table: LeaseTable,
        streams: RunnerStreams,
        poll_interval_s: float,
        replicas: LiveReplicas | None = None,
        durations: DurationTracker | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Creates an empty backlog; see `Dispatcher` for the arguments."""
        self._table = table
        self._streams = streams
        self._poll_interval_s = poll_interval_s
        clock = clock or Clock()
        self._clock = clock.monotonic_s
        self.ready = (
            FairQueue(clock=clock) if durations is None else FairQueue(predicted_s=durations.predicted_s, clock=clock)
        )
        self.projects: dict[int, Project] = {}
        self._delayed = DelayedItems()
        self._others = WorkStealer(replicas or LiveReplicas(UUID(int=0)), clock=clock)
        # Positions of other replicas' work that fits waiting credit.
        self._others_at: dict[int, Position] = {}
        self._readings: dict[int, _Reading] = {}
        # Projects with waiting rows that are not known here.
        self._more: set[int] = set()
        self._offered: set[tuple[Labels, frozenset[int] | None]] = set()
        self._fresh: set[int] = set()
        self._hinted: set[int] = set()
        # Projects hinted since the heads were last read.
        self._hinted_heads: set[int] = set()
        self._read_again_at = 0.0
        self._next_poll = 0.0

    def __len__(self) -> int:
        """Returns the number of items known to this replica, ready and delayed."""
        return len(self.ready) + len(self._delayed)

    def update_project(self, project: Project) -> bool:
        """Applies a project's weight, quotas, rules and pauses; returns whether other items may be the next ones now."""
        project_id, terms = project.project_id, project.terms
        before = self.projects.get(project_id)
        self.projects[project_id] = project
        self.ready.learn(project_id, terms)
        if before is None:
            return False
        is_reordered = before.terms.order_revision != terms.order_revision
        if is_reordered:
            self.ready.forget(project_id)
            self._delayed.forget(project_id)
        if is_reordered or before.terms.paused_agents - terms.paused_agents:
            # Rows of paused agents were read and dropped.
            self._readings[project_id] = _Reading()
            self._more.add(project_id)
            self._hinted.add(project_id)
            return True
        return before.terms.is_paused and not terms.is_paused

    def offer(self, items: Iterable[tuple[ReadyItem, float]]) -> bool:
        """Adds committed items, each with its delay in seconds; returns whether any is this replica's own."""
        spare: int | None = None
        is_ours = False
        for item, delay_s in items:
            project_id = item.project_id
            if delay_s > 0:
                self._delayed.hold(item, now=self._clock(), delay_s=delay_s)
                is_ours = True
                continue
            self._fresh.add(project_id)
            if not self._others.is_own(item):
                # Waiting credit takes even other replicas' work immediately, because they do not know of it yet.
                spare = self._streams.open_credit() - len(self.ready) if spare is None else spare - 1
                if spare <= 0:
                    self._see_others(project_id, BEFORE_ALL)
                    continue
            is_ours = True
            if self.ready.count_of(project_id) < WINDOW_PER_PROJECT:
                self.ready.push(item)
            else:
                self._leave_out(project_id)
                self._readings[project_id].change()
        return is_ours

    def ripen(self) -> None:
        """Moves due delayed items to the queue."""
        for item in self._delayed.due(self._clock()):
            self._fresh.add(item.project_id)
            if self._others.is_own(item):
                self.ready.push(item)
            else:
                self._see_others(item.project_id, BEFORE_ALL)

    def hint(self, projects: Iterable[int]) -> None:
        """Marks projects to be read by the next refill, if credit waits."""
        self._hinted.update(projects)

    def poll_soon(self) -> None:
        """Makes the next refill a poll."""
        self._next_poll = 0.0

    def poll_is_due(self) -> bool:
        """Returns whether the next refill is a poll; a poll reads all projects if credit waits."""
        return self._clock() >= self._next_poll

    def pause_s(self) -> float:
        """Returns the seconds until an item, a steal or a poll is due."""
        now = self._clock()
        pause_s = self._delayed.pause_s(now, self._poll_interval_s)
        if self._others.steal_at() < now + pause_s and self._streams.open_credit():
            pause_s = max(0.0, self._others.steal_at() - now)
        return pause_s

    async def refill(self) -> None:
        """Reads unknown rows if due: after a start, from other replicas, beyond the window.

        Raises:
            DatabaseUnavailable: If the table cannot be read.
        """
        due = self.poll_is_due()
        if not (due or self._hinted or any(map(self._runs_low, self._more))):
            return
        idle_credit = self._streams.open_credit() > 0
        hinted, self._hinted = self._hinted, set()
        self._hinted_heads |= hinted
        for project_id in hinted:
            self._reading_of(project_id).change()
        if due:
            self._next_poll = self._clock() + self._poll_interval_s
            self._check_new_offers()
            if not idle_credit:
                await self._read_heads()
        # The quotas must be known before the first match.
        if due and (idle_credit or not self.projects):
            projects = await self._table.projects()
            for project in projects:
                self.update_project(project)
            wanted = {project.project_id for project in projects}
        else:
            wanted = {project_id for project_id in self._more if self._runs_low(project_id)}
            wanted |= hinted if idle_credit else set()
        for project_id in wanted:
            await self._refill_project(project_id)

    def read_again(self, projects: Iterable[int]) -> None:
        """Rereads projects in which rows were claimed by other replicas or cancelled; more may have been."""
        if self._clock() < self._read_again_at:
            return
        self._read_again_at = self._clock() + READ_AGAIN_INTERVAL_S
        for project_id in projects:
            self.ready.forget(project_id)
            self._readings[project_id] = _Reading()
            self._more.add(project_id)

    def forget_delays(self, projects: Iterable[int]) -> None:
        """Forgets which items may not run yet, and reads projects again."""
        self._delayed = DelayedItems()
        self._read_again_at = 0.0
        self.read_again([*projects, *self.projects])
        self.poll_soon()

    async def steal(self) -> bool:
        """Adds other replicas' work that fits waiting credit, once due; returns whether any was added.

        Raises:
            DatabaseUnavailable: If the table cannot be read.
        """
        found = False
        for project_id in self._others.due() if self._streams.open_credit() else ():
            for item in await self._choose_others(project_id):
                self.ready.push(item)
                found = True
        return found

    def nothing_to_steal(self) -> None:
        """Records that the items added by `steal` cannot be assigned now."""
        self._others.nothing_fits()
        self._others_at.clear()

    def drain_unmatched(self) -> frozenset[int]:
        """Returns the projects with items that became ready since the last call and still wait."""
        left = {project_id for project_id in self._fresh if self.ready.count_of(project_id)}
        left |= self._fresh & self._others.projects()
        self._fresh = set()
        return frozenset(project_id for project_id in left if not self.ready.terms_of(project_id).is_paused)

    async def _read_heads(self) -> None:
        """Reads the first rows of projects while no credit is idle, since urgent work may wait at another replica."""
        known = (project_id for project_id in self.projects if self.ready.count_of(project_id))
        for project_id in islice(dict.fromkeys((*self._hinted_heads, *known)), MAX_HEADS):
            page = await self._table.waiting(project_id, after=BEFORE_ALL, limit=HEAD_PAGE)
            self._take_page(project_id, page, after=BEFORE_ALL, is_recheck=True)
        self._hinted_heads.clear()

    def _reading_of(self, project_id: int) -> _Reading:
        return self._readings.setdefault(project_id, _Reading())

    def _runs_low(self, project_id: int) -> bool:
        return self.ready.count_of(project_id) < LOW_WATER

    def _leave_out(self, project_id: int) -> None:
        self._reading_of(project_id).left_out = True
        self._more.add(project_id)

    def _check_new_offers(self) -> None:
        """Rereads everything if runners with new labels wait, since they may run rows that were skipped."""
        offered = {(stream.labels, stream.projects) for stream in self._streams.all_open() if stream.can_take}
        if not offered <= self._offered:
            for reading in self._readings.values():
                reading.change()
        self._offered = offered

    async def _refill_project(self, project_id: int) -> None:
        reading = self._reading_of(project_id)
        if reading.whole and project_id in self._more and self._runs_low(project_id):
            reading.change()
        reading.begin()
        # New rows may have been added at the head; rows after it that were already read need not be read again.
        is_recheck, read_to = reading.whole, reading.position
        after = read_to if is_recheck else BEFORE_ALL
        before = self.ready.count_of(project_id)
        for _ in range(MAX_REFILL_PAGES):
            page = await self._table.waiting(project_id, after=after, limit=REFILL_PAGE)
            taken = self._take_page(project_id, page, after=after, is_recheck=is_recheck)
            if len(page) < REFILL_PAGE:
                if not reading.left_out:
                    self._more.discard(project_id)
                reading.end()
                return
            after = _end_of(page)
            if not taken and is_recheck:
                break
            if not taken:
                after = max(after, read_to)
            if self.ready.count_of(project_id) - before >= REFILL_PAGE:
                break
        reading.position = max(after, read_to)
        if is_recheck:
            return
        self._more.add(project_id)
        if self.ready.terms_of(project_id).rules.ageing_interval_s:
            # Rows after a long backlog of higher priority must be known here, or ageing could never raise them.
            oldest = await self._table.oldest(project_id, per_priority=OLDEST_PER_PRIORITY)
            self._take_page(project_id, oldest, after=BEFORE_ALL, is_recheck=False)

    def _take_page(
        self, project_id: int, page: Sequence[tuple[ReadyItem, float]], *, after: Position, is_recheck: bool
    ) -> int:
        """Adds the unknown items of a page; returns their number."""
        before = len(self)
        fits = self._fitting(project_id)
        for item in self._others.overdue(page):
            self.ready.push(item)
        room = WINDOW_PER_PROJECT - self.ready.count_of(project_id)
        for item, delay_s in page:
            if item.rollout_id in self.ready or item.rollout_id in self._delayed:
                continue
            if not self._others.is_own(item):
                # Repeated rechecks of the same rows must not reread other replicas' pages each time.
                if not is_recheck or fits(item):
                    self._see_others(project_id, after)
            elif delay_s > 0:
                self._delayed.hold(item, now=self._clock(), delay_s=delay_s)
            elif room > 0 or (room > -WINDOW_MARGIN and fits(item)):
                self.ready.push(item)
                room -= 1
            else:
                self._leave_out(project_id)
        return len(self) - before

    def _see_others(self, project_id: int, after: Position) -> None:
        self._others.seen(project_id)
        self._others_at[project_id] = min(after, self._others_at.get(project_id, after))

    async def _choose_others(self, project_id: int) -> list[ReadyItem]:
        fits = self._fitting(project_id)
        after = self._others_at.pop(project_id, BEFORE_ALL)
        for _ in range(MAX_REFILL_PAGES):
            page = await self._table.waiting(project_id, after=after, limit=REFILL_PAGE)
            more = len(page) == REFILL_PAGE
            others = self._others.fitting(page, fits)
            if others or not more:
                break
            after = _end_of(page)
        if others:
            self._others_at[project_id] = after
        return self._others.choose(others, project_id=project_id, credit=self._streams.open_credit(), more=more)

    def _fitting(self, project_id: int) -> Callable[[ReadyItem], bool]:
        """Returns a predicate that is True for items of a project that fit waiting credit."""
        if self.ready.terms_of(project_id).is_paused:
            return lambda _item: False
        able = {
            stream.labels
            for stream in self._streams.all_open()
            if stream.can_take and (stream.projects is None or project_id in stream.projects)
        }
        if able and not self.ready.terms_of(project_id).rules.match_labels:
            return lambda _item: True
        return lambda item: any(item.labels <= labels for labels in able)


def _end_of(page: Sequence[tuple[ReadyItem, float]]) -> Position:
    last, _ = page[-1]
    return last.sort_priority, last.rollout_id


# Items due later are read from the table when they become due.
HORIZON_S: Final = 600.0


class DelayedItems:
    """Items that may not run yet because of a back-off or a not-before time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ReadyItem]] = []
        self._ids: set[UUID] = set()

    def __len__(self) -> int:
        """Returns the number of items."""
        return len(self._heap)

    def __contains__(self, rollout_id: UUID) -> bool:
        """Returns whether a rollout is held here."""
        return rollout_id in self._ids

    def hold(self, item: ReadyItem, *, now: float, delay_s: float) -> None:
        """Holds an item for a delay in seconds; ignores items already held or due beyond the horizon."""
        if delay_s > HORIZON_S or item.rollout_id in self._ids:
            return
        self._ids.add(item.rollout_id)
        heapq.heappush(self._heap, (now + delay_s, item.rollout_id.int, item))

    def forget(self, project_id: int) -> None:
        """Drops the items of a project."""
        self._heap = [entry for entry in self._heap if entry[2].project_id != project_id]
        heapq.heapify(self._heap)
        self._ids = {item.rollout_id for _, _, item in self._heap}

    def due(self, now: float) -> list[ReadyItem]:
        """Removes and returns the due items, earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, _, item = heapq.heappop(self._heap)
            self._ids.discard(item.rollout_id)
            found.append(item)
        return found

    def pause_s(self, now: float, limit_s: float) -> float:
        """Returns the seconds until the next item is due, at most `limit_s`."""
        return min(limit_s, max(0.0, self._heap[0][0] - now)) if self._heap else limit_s
