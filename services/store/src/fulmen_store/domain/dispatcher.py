"""Background role: hands waiting rollouts to runners that have credit.

Speed lives here, safety in the row: the dispatcher chooses in memory who gets what, then claims the whole
batch by compare-and-set in one commit. A choice that another replica made first is simply not granted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.domain.delayed import DelayedItems
from fulmen_store.domain.fair_queue import FairQueue, Labels, ReadyItem
from fulmen_store.domain.leases import AttemptReport, Grant, LeaseTable, Project
from fulmen_store.domain.matching import Choice, match, without_runner
from fulmen_store.domain.quotas import RunningQuotas
from fulmen_store.domain.seats import Assigned, Seat, Seats
from fulmen_store.domain.shares import OthersWork
from fulmen_store.domain.transitions import FailureKind

__all__ = ["DispatchMeter", "Dispatcher", "released"]

MAX_CLAIM_ROWS: Final = 1000
REFILL_PAGE: Final = 2000
OLDEST_PER_RANK: Final = 100
MAX_REFILL_PAGES: Final = 10
LOW_WATER: Final = 500
WINDOW_PER_PROJECT: Final = 50_000
RETRY_PAUSE_S: Final = 0.2
READ_AGAIN_INTERVAL_S: Final = 0.05
LOWEST_ID: Final = UUID(int=0)
BEFORE_ALL: Final = (-32768, LOWEST_ID)


class DispatchMeter(Protocol):
    """What the dispatcher tells about its work."""

    def dispatched(self, count: int, latency_s: float) -> None:
        """Notes that work was handed out, and how long after its match."""
        ...

    def claims_lost(self, count: int) -> None:
        """Notes claims of rows that another replica had claimed, or that were cancelled."""
        ...


class Dispatcher:
    """Matches ready work with credit, claims, and puts the grants into the runners' outboxes."""

    def __init__(
        self,
        *,
        table: LeaseTable,
        seats: Seats,
        undelivered: Callable[[Sequence[AttemptReport]], None],
        poll_interval_s: float,
        meter: DispatchMeter | None = None,
        predicted_s: Callable[[int | None], float] = lambda _task_type: 0.0,
        place: Callable[[UUID], int] = lambda _key: 0,
        unmatched: Callable[[frozenset[int]], None] = lambda _projects: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wires the dispatcher.

        Args:
            table: where leases live.
            seats: the runners that wait.
            undelivered: takes the leases that no runner was told of, as RELEASED reports, to give them back.
            poll_interval_s: how often idle credit looks into the table for work of other replicas.
            meter: told about every delivery.
            predicted_s: how long an attempt of a task type is expected to take, seconds.
            place: counts the replicas that are preferred to this one for a rollout; 0 means that it is its own.
            unmatched: told the projects of new work that no runner here has credit for.
            clock: monotonic seconds.
        """
        self._table = table
        self._seats = seats
        self._undelivered = undelivered
        self._poll_interval_s = poll_interval_s
        self._meter = meter
        self._clock = clock
        self._projects: dict[int, Project] = {}
        self._ready = FairQueue(predicted_s=predicted_s)
        self._quotas = RunningQuotas(table, self._ready)
        self._delayed = DelayedItems()
        self._doubtful: dict[UUID, UUID] = {}
        self._more: set[int] = set()
        self._others = OthersWork(place, clock=clock)
        self._unmatched = unmatched
        self._fresh: set[int] = set()
        self._hinted: set[int] = set()
        self._read_again_at = 0.0
        self._wake = asyncio.Event()
        self._next_poll = 0.0
        # Whether nothing that waits here could be handed to a runner that waits here.
        self._settled = False

    def __len__(self) -> int:
        """Counts the items known to this replica, ready and delayed."""
        return len(self._ready) + len(self._delayed)

    def know_project(self, project: Project) -> None:
        """Learns a project's weight, quotas and rules."""
        self._projects[project.project_id] = project
        self._ready.learn(project.project_id, project.terms)

    def offer(self, items: Iterable[tuple[ReadyItem, float]]) -> None:
        """Adds committed work, each item with the seconds until it may run."""
        spare: int | None = None
        for item, delay_s in items:
            if delay_s <= 0:
                self._fresh.add(item.project_id)
                if not self._others.is_own(item):
                    # Credit that waits here takes others' work at once: nobody else knows of it yet.
                    spare = self._seats.open_credit() - len(self._ready) if spare is None else spare - 1
                    if spare <= 0:
                        self._others.seen(item.project_id)
                        continue
            if delay_s > 0:
                self._delayed.hold(item, now=self._clock(), delay_s=delay_s)
            elif self._ready.count_of(item.project_id) < WINDOW_PER_PROJECT:
                self._ready.push(item)
            else:
                self._more.add(item.project_id)
            self._settled = False
        self._wake.set()

    def match_new(self, items: Iterable[ReadyItem], besides: Mapping[UUID, UUID] | None = None) -> dict[UUID, Seat]:
        """Finds runners that wait for work that is about to be created, by rollout.

        Nothing is matched while other work could go first. Each match has used a credit: it must be passed on to
        `deliver_new`, `unmatch` or `doubt`. For second attempts of running rollouts, `besides` names the first one's
        session, by rollout.
        """
        matches: dict[UUID, Seat] = {}
        if not self._settled:
            return matches
        for item in items:
            terms = self._ready.terms_of(item.project_id)
            # Whether a quota leaves room is known only to the database; a second attempt needs none.
            if item.rollout_id in matches or (terms.max_running is not None and besides is None):
                continue
            seat = self._seats.next_for(item, terms.rules, besides=(besides or {}).get(item.rollout_id))
            if seat is not None:
                seat.give(item)
                matches[item.rollout_id] = seat
        return matches

    def hedging_projects(self) -> list[int]:
        """Returns the projects whose attempts may be hedged, if there is credit that nothing waits for."""
        idle = self._settled and self._seats.open_credit() > 0
        return [each.project_id for each in self._projects.values() if idle and each.terms.rules.hedging]

    def deliver_new(self, matches: Mapping[UUID, Seat], grants: Iterable[Grant]) -> None:
        """Hands out the leases that were created; the credit of the other matches is given back."""
        granted = {grant.rollout_id: grant for grant in grants}
        self._deliver([(rollout_id, seat) for rollout_id, seat in matches.items()], granted)

    def unmatch(self, matches: Mapping[UUID, Seat]) -> None:
        """Gives the credit of matches back, of which nothing was created."""
        for seat in matches.values():
            seat.take_back()

    def doubt(self, matches: Mapping[UUID, Seat]) -> None:
        """Takes note of matches of which it is not known whether they were created; no runner is told of them."""
        for rollout_id, seat in matches.items():
            self._doubtful[rollout_id] = seat.session_id
            seat.take_back()
        self._wake.set()

    def freed(self, projects: Iterable[int]) -> None:
        """Takes note of attempts that ended, each by its project: where there is a quota, there is room again."""
        if self._quotas.ended(projects):
            self._wake.set()

    def add_credit(self, seat: Seat, count: int) -> None:
        """Adds credit to a seat; work that waited for it goes before work that is new."""
        seat.credit += count
        if len(self._ready):
            self._settled = False
            self._wake.set()

    def look(self, projects: frozenset[int]) -> None:
        """Reads the waiting work of projects soon, if there is credit for it: another replica said that there is some."""
        self._hinted |= projects
        self._wake.set()

    def without_runner(self, project_id: int) -> list[tuple[Labels, int]]:
        """Returns the label sets of a project's waiting items that no runner here has, and how many wait for them."""
        return without_runner(self._ready, self._seats.all_open(), project_id)

    async def run(self) -> None:
        """Dispatches until it is cancelled."""
        while True:
            try:
                await self._step()
            except DatabaseUnavailable:
                # Nothing is lost: what was chosen went back, and the table is read again.
                self._next_poll = 0.0
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _step(self) -> None:
        self._wake.clear()
        if self._doubtful:
            await self._settle_doubtful()
        self._ripen()
        if self._clock() >= self._next_poll or self._hinted or self._running_low():
            await self._refill()
        choices = self._match()
        if not choices and (projects := self._others.due()):
            choices = await self._match_others(projects)
        self._tell_unmatched()
        self._settled = not choices
        if choices:
            await self._claim(choices)
            return
        if not self._wake.is_set():
            await self._wait()

    async def _wait(self) -> None:
        now = self._clock()
        pause_s = self._delayed.pause_s(now, self._poll_interval_s)
        if self._others.look_at() < now + pause_s and self._seats.open_credit():
            pause_s = max(0.0, self._others.look_at() - now)
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _match(self) -> list[Choice]:
        hungry = self._seats.with_credit() if len(self._ready) else []
        return match(self._ready, hungry, limit=MAX_CLAIM_ROWS)

    async def _claim(self, choices: list[tuple[ReadyItem, Seat]]) -> None:
        matched = self._clock()
        try:
            grants = await self._quotas.claim(choices)
        except DatabaseUnavailable:
            for item, seat in choices:
                self._doubtful[item.rollout_id] = seat.session_id
                self._ready.push(item)
                seat.take_back()
            raise
        self._deliver(
            [(item.rollout_id, seat) for item, seat in choices], {grant.rollout_id: grant for grant in grants}
        )
        if self._meter is not None:
            self._meter.dispatched(len(grants), self._clock() - matched)
        if len(grants) < len(choices):
            self._read_again(choices, {grant.rollout_id for grant in grants})

    async def _settle_doubtful(self) -> None:
        """Gives back what a claim leased although its answer was lost: no runner was told of it."""
        held = await self._table.held(list(self._doubtful))
        unknown = [lease for lease in held if self._doubtful[lease.rollout_id] == lease.session_id]
        self._doubtful = {}
        if unknown:
            self._undelivered([released(lease.rollout_id, lease.session_id, lease.epoch) for lease in unknown])

    def _deliver(self, choices: Iterable[tuple[UUID, Seat]], granted: Mapping[UUID, Grant]) -> None:
        per_seat: dict[Seat, list[Grant]] = {}
        for rollout_id, seat in choices:
            grant = granted.get(rollout_id)
            if grant is None:
                seat.take_back()
            else:
                per_seat.setdefault(seat, []).append(grant)
        for seat, grants in per_seat.items():
            if seat.closed:
                self._undelivered([released(grant.rollout_id, grant.session_id, grant.epoch) for grant in grants])
                continue
            for grant in grants:
                seat.leases[grant.rollout_id] = grant.epoch
            seat.tell(Assigned(grants=grants))

    def _ripen(self) -> None:
        for item in self._delayed.due(self._clock()):
            self._fresh.add(item.project_id)
            if self._others.is_own(item):
                self._ready.push(item)
            else:
                self._others.seen(item.project_id)

    def _running_low(self) -> bool:
        return any(self._ready.count_of(project_id) < LOW_WATER for project_id in self._more)

    async def _refill(self) -> None:
        """Reads waiting work that this replica does not know: after a start, from other replicas, beyond the window."""
        idle_credit = self._seats.open_credit() > 0
        due = self._clock() >= self._next_poll
        hinted, self._hinted = self._hinted, set()
        if due:
            self._next_poll = self._clock() + self._poll_interval_s
            self._quotas.look_again()
        # Before the first match the quotas have to be known.
        if due and (idle_credit or not self._projects):
            projects = await self._table.projects()
            for project in projects:
                self.know_project(project)
            wanted = {project.project_id for project in projects}
        else:
            wanted = {project_id for project_id in self._more if self._ready.count_of(project_id) < LOW_WATER}
            wanted |= hinted if idle_credit else set()
        for project_id in wanted:
            await self._refill_project(project_id)

    async def _refill_project(self, project_id: int) -> None:
        after = BEFORE_ALL
        before = self._ready.count_of(project_id)
        for _ in range(MAX_REFILL_PAGES):
            page = await self._table.waiting(project_id, after=after, limit=REFILL_PAGE)
            self._take_page(project_id, page)
            if len(page) < REFILL_PAGE:
                self._more.discard(project_id)
                return
            after = (page[-1][0].rank, page[-1][0].rollout_id)
            if self._ready.count_of(project_id) - before >= REFILL_PAGE:
                break
        self._more.add(project_id)
        if self._ready.terms_of(project_id).rules.ageing_interval_s:
            # What waits behind a long backlog of higher priority must not starve: it has to be known to go first.
            self._take_page(project_id, await self._table.oldest(project_id, per_rank=OLDEST_PER_RANK))

    def _take_page(self, project_id: int, page: Sequence[tuple[ReadyItem, float]]) -> None:
        for item in self._others.overdue(page):
            self._ready.push(item)
        for item, delay_s in page:
            if item.rollout_id in self._ready or item.rollout_id in self._delayed:
                continue
            if not self._others.is_own(item):
                self._others.seen(project_id)
            elif delay_s > 0:
                self._delayed.hold(item, now=self._clock(), delay_s=delay_s)
            else:
                self._ready.push(item)

    async def _match_others(self, projects: frozenset[int]) -> list[Choice]:
        """Reads work of others and matches it with the credit that found nothing else."""
        hungry = self._seats.with_credit()
        found = False
        for project_id in projects if hungry else ():
            for item in await self._choose_others(project_id, hungry):
                self._ready.push(item)
                found = True
        choices = self._match() if found else []
        if found and not choices:
            self._others.nothing_fits()
        return choices

    async def _choose_others(self, project_id: int, hungry: Sequence[Seat]) -> list[ReadyItem]:
        takers = {(seat.labels, seat.projects) for seat in hungry}
        match_labels = self._ready.terms_of(project_id).rules.match_labels
        after = BEFORE_ALL
        for _ in range(MAX_REFILL_PAGES):
            page = await self._table.waiting(project_id, after=after, limit=REFILL_PAGE)
            more = len(page) == REFILL_PAGE
            others = self._others.fitting(page, project_id=project_id, takers=takers, match_labels=match_labels)
            if others or not more:
                break
            after = (page[-1][0].rank, page[-1][0].rollout_id)
        credit = sum(seat.credit for seat in hungry)
        return self._others.choose(others, project_id=project_id, credit=credit, more=more)

    def _read_again(self, choices: Sequence[Choice], granted: set[UUID]) -> None:
        """Reads projects anew of which some rows were taken by another replica, or cancelled: more may have been."""
        # What a quota refused is in the queue again.
        lost = [
            item.project_id
            for item, _ in choices
            if item.rollout_id not in granted and item.rollout_id not in self._ready
        ]
        if self._meter is not None and lost:
            self._meter.claims_lost(len(lost))
        if not lost or self._clock() < self._read_again_at:
            return
        self._read_again_at = self._clock() + READ_AGAIN_INTERVAL_S
        for project_id in set(lost):
            self._ready.forget(project_id)
            self._more.add(project_id)

    def _tell_unmatched(self) -> None:
        """Tells the other replicas of new work that found no credit here."""
        left = {project_id for project_id in self._fresh if self._ready.count_of(project_id)}
        left |= self._fresh & self._others.projects()
        self._fresh = set()
        if left:
            self._unmatched(frozenset(left))


def released(rollout_id: UUID, session_id: UUID, epoch: int) -> AttemptReport:
    """Makes the report that gives a lease back."""
    return AttemptReport(rollout_id=rollout_id, session_id=session_id, epoch=epoch, kind=FailureKind.RELEASED)
