"""The backlog: what waits in the table, as far as this replica knows it.

Invariant: what waits in the table is known here (in the queue, among the delayed items, or noted as others' work), or
it lies where the next refills read. A refill goes on where the last one of its project ended, and at the end of the
table it begins anew; so nothing stays hidden, however much waits before it that no runner here can use. All of it is a
hint: the row decides who gets an item.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final
from uuid import UUID

from fulmen_store.leases.leases import LeaseTable, Project
from fulmen_store.scheduling.fair_queue import FairQueue, Labels, ReadyItem
from fulmen_store.scheduling.runner_streams import RunnerStreams
from fulmen_store.scheduling.shares import WorkStealer

__all__ = [
    "Backlog",
    "DelayedItems",
]

REFILL_PAGE: Final = 1000
OLDEST_PER_RANK: Final = 100
MAX_REFILL_PAGES: Final = 10
LOW_WATER: Final = 500
HEAD_PAGE: Final = 200
MAX_HEADS: Final = 64
WINDOW_PER_PROJECT: Final = 50_000
# Beyond the window, only what credit waits for.
WINDOW_MARGIN: Final = REFILL_PAGE
READ_AGAIN_INTERVAL_S: Final = 0.05

Position = tuple[int, UUID]
BEFORE_ALL: Final[Position] = (-32768, UUID(int=0))


@dataclass(slots=True)
class _Reading:
    """How far the waiting work of one project has been read.

    Attributes:
        position: where the next refill goes on.
        whole: whether all of it was read since the last change: polls then only look for what nobody told of.
        left_out: whether some found no room here since the table was begun anew.
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
    """Holds the waiting work that is known here, and reads the rest from the table.

    Attributes:
        ready: what may run, in the order in which it is handed out.
        projects: the projects by number.
    """

    def __init__(
        self,
        *,
        table: LeaseTable,
        streams: RunnerStreams,
        poll_interval_s: float,
        predicted_s: Callable[[int | None], float] = lambda _task_type: 0.0,
        place: Callable[[UUID], int] = lambda _key: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wires the backlog; see `Dispatcher` for the arguments."""
        self._table = table
        self._streams = streams
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self.ready = FairQueue(predicted_s=predicted_s)
        self.projects: dict[int, Project] = {}
        self._delayed = DelayedItems()
        self._others = WorkStealer(place, clock=clock)
        # Where others' work was seen that credit waits for.
        self._others_at: dict[int, Position] = {}
        self._readings: dict[int, _Reading] = {}
        # Projects of which more waits than is known here.
        self._more: set[int] = set()
        self._offered: set[tuple[Labels, frozenset[int] | None]] = set()
        self._fresh: set[int] = set()
        self._hinted: set[int] = set()
        # Projects that were hinted at since the heads were looked at last.
        self._told: set[int] = set()
        self._read_again_at = 0.0
        self._next_poll = 0.0

    def __len__(self) -> int:
        """Counts the items known to this replica, ready and delayed."""
        return len(self.ready) + len(self._delayed)

    def update_project(self, project: Project) -> None:
        """Learns a project's weight, quotas and rules."""
        self.projects[project.project_id] = project
        self.ready.learn(project.project_id, project.terms)

    def offer(self, items: Iterable[tuple[ReadyItem, float]]) -> bool:
        """Adds committed work, each item with the seconds until it may run; returns whether any is this replica's."""
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
                # Credit that waits here takes others' work at once: nobody else knows of it yet.
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
        """Makes the delayed items ready that are due."""
        for item in self._delayed.due(self._clock()):
            self._fresh.add(item.project_id)
            if self._others.is_own(item):
                self.ready.push(item)
            else:
                self._see_others(item.project_id, BEFORE_ALL)

    def hint(self, projects: Iterable[int]) -> None:
        """Reads projects at the next refill, if credit waits: there is said to be news of them."""
        self._hinted.update(projects)

    def poll_soon(self) -> None:
        """Makes the next refill a poll."""
        self._next_poll = 0.0

    def poll_is_due(self) -> bool:
        """Tells whether the next refill is a poll: it looks into all projects, if credit waits."""
        return self._clock() >= self._next_poll

    def pause_s(self) -> float:
        """Returns the seconds until something is due here: an item, others' work for credit that waits, or a poll."""
        now = self._clock()
        pause_s = self._delayed.pause_s(now, self._poll_interval_s)
        if self._others.look_at() < now + pause_s and self._streams.open_credit():
            pause_s = max(0.0, self._others.look_at() - now)
        return pause_s

    async def refill(self) -> None:
        """Reads what is not known here, where it is time: after a start, from other replicas, beyond the window.

        Raises:
            DatabaseUnavailable: if the table cannot be read.
        """
        due = self.poll_is_due()
        if not (due or self._hinted or any(map(self._runs_low, self._more))):
            return
        idle_credit = self._streams.open_credit() > 0
        hinted, self._hinted = self._hinted, set()
        self._told |= hinted
        for project_id in hinted:
            self._reading_of(project_id).change()
        if due:
            self._next_poll = self._clock() + self._poll_interval_s
            self._note_new_offers()
            if not idle_credit:
                await self._look_at_heads()
        # Before the first match the quotas have to be known.
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
        """Reads projects anew of which other replicas took rows, or rows were cancelled: more may have been."""
        if self._clock() < self._read_again_at:
            return
        self._read_again_at = self._clock() + READ_AGAIN_INTERVAL_S
        for project_id in projects:
            self.ready.forget(project_id)
            self._readings[project_id] = _Reading()
            self._more.add(project_id)

    async def take_others(self) -> bool:
        """Adds work of others, once it is time, that credit waits for here; returns whether there is any.

        Raises:
            DatabaseUnavailable: if the table cannot be read.
        """
        found = False
        for project_id in self._others.due() if self._streams.open_credit() else ():
            for item in await self._choose_others(project_id):
                self.ready.push(item)
                found = True
        return found

    def no_others_fit(self) -> None:
        """Notes that what `take_others` added cannot be handed out here now."""
        self._others.nothing_fits()
        self._others_at.clear()

    def take_unmatched(self) -> frozenset[int]:
        """Returns the projects whose work became ready since the last call and is waiting still."""
        left = {project_id for project_id in self._fresh if self.ready.count_of(project_id)}
        left |= self._fresh & self._others.projects()
        self._fresh = set()
        return frozenset(left)

    async def _look_at_heads(self) -> None:
        """Reads what goes first in projects, while all credit is used: something urgent may wait at another replica."""
        known = (project_id for project_id in self.projects if self.ready.count_of(project_id))
        for project_id in islice(dict.fromkeys((*self._told, *known)), MAX_HEADS):
            page = await self._table.waiting(project_id, after=BEFORE_ALL, limit=HEAD_PAGE)
            self._take_page(project_id, page, after=BEFORE_ALL, is_look=True)
        self._told.clear()

    def _reading_of(self, project_id: int) -> _Reading:
        return self._readings.setdefault(project_id, _Reading())

    def _runs_low(self, project_id: int) -> bool:
        return self.ready.count_of(project_id) < LOW_WATER

    def _leave_out(self, project_id: int) -> None:
        self._reading_of(project_id).left_out = True
        self._more.add(project_id)

    def _note_new_offers(self) -> None:
        """Reads everything again if runners wait whose like did not: they may run what was left out."""
        offered = {(stream.labels, stream.projects) for stream in self._streams.all_open() if stream.credit > 0}
        if not offered <= self._offered:
            for reading in self._readings.values():
                reading.change()
        self._offered = offered

    async def _refill_project(self, project_id: int) -> None:
        reading = self._reading_of(project_id)
        if reading.whole and project_id in self._more and self._runs_low(project_id):
            reading.change()
        reading.begin()
        # Work that goes first may have come to the head; behind it, what was read before need not be read again.
        is_look, read_to = reading.whole, reading.position
        after = read_to if is_look else BEFORE_ALL
        before = self.ready.count_of(project_id)
        for _ in range(MAX_REFILL_PAGES):
            page = await self._table.waiting(project_id, after=after, limit=REFILL_PAGE)
            taken = self._take_page(project_id, page, after=after, is_look=is_look)
            if len(page) < REFILL_PAGE:
                if not reading.left_out:
                    self._more.discard(project_id)
                reading.end()
                return
            after = _end_of(page)
            if not taken and is_look:
                break
            if not taken:
                after = max(after, read_to)
            if self.ready.count_of(project_id) - before >= REFILL_PAGE:
                break
        reading.position = max(after, read_to)
        if is_look:
            return
        self._more.add(project_id)
        if self.ready.terms_of(project_id).rules.ageing_interval_s:
            # What waits behind a long backlog of higher priority must not starve: it has to be known to go first.
            oldest = await self._table.oldest(project_id, per_rank=OLDEST_PER_RANK)
            self._take_page(project_id, oldest, after=BEFORE_ALL, is_look=False)

    def _take_page(
        self, project_id: int, page: Sequence[tuple[ReadyItem, float]], *, after: Position, is_look: bool
    ) -> int:
        """Takes what was not known here; returns how many items."""
        before = len(self)
        fits = self._fitting(project_id)
        for item in self._others.overdue(page):
            self.ready.push(item)
        room = WINDOW_PER_PROJECT - self.ready.count_of(project_id)
        for item, delay_s in page:
            if item.rollout_id in self.ready or item.rollout_id in self._delayed:
                continue
            if not self._others.is_own(item):
                # A look that comes to the same work again and again must not make others' pages be read each time.
                if not is_look or fits(item):
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
        """Returns what tells whether an item of a project fits credit that waits here."""
        able = {
            stream.labels
            for stream in self._streams.all_open()
            if stream.credit > 0 and (stream.projects is None or project_id in stream.projects)
        }
        if able and not self.ready.terms_of(project_id).rules.match_labels:
            return lambda _item: True
        return lambda item: any(item.labels <= labels for labels in able)


def _end_of(page: Sequence[tuple[ReadyItem, float]]) -> Position:
    last, _ = page[-1]
    return last.rank, last.rollout_id


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
