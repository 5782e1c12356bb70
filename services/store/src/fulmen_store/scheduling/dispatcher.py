"""Background role: hands waiting rollouts to runners that have credit.

Speed lives here, safety in the row: the dispatcher chooses in memory who gets what, then claims the whole
batch by compare-and-set in one commit. A choice that another replica made first is simply not granted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.leases.leases import AttemptReport, Grant, LeaseTable, Project
from fulmen_store.metrics import StoreMetrics
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.scheduling.backlog import Backlog
from fulmen_store.scheduling.fair_queue import Labels, ReadyItem
from fulmen_store.scheduling.matching import Choice, match, unmatched_labels
from fulmen_store.scheduling.quotas import RunningQuotas
from fulmen_store.scheduling.runner_streams import Assigned, RunnerStream, RunnerStreams

__all__ = [
    "Dispatcher",
    "released",
]

MAX_CLAIM_ROWS: Final = 1000
RETRY_PAUSE_S: Final = 0.2


class Dispatcher:
    """Matches ready work with credit, claims, and puts the grants into the runners' outboxes."""

    def __init__(
        self,
        *,
        table: LeaseTable,
        streams: RunnerStreams,
        undelivered: Callable[[Sequence[AttemptReport]], None],
        poll_interval_s: float,
        meter: StoreMetrics | None = None,
        predicted_s: Callable[[int | None], float] = lambda _task_type: 0.0,
        place: Callable[[UUID], int] = lambda _key: 0,
        unmatched: Callable[[frozenset[int]], None] = lambda _projects: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wires the dispatcher.

        Args:
            table: where leases live.
            streams: the runners that wait.
            undelivered: takes the leases that no runner was told of, as RELEASED reports, to give them back.
            poll_interval_s: how often idle credit looks into the table for work of other replicas.
            meter: told about every delivery.
            predicted_s: how long an attempt of a task type is expected to take, seconds.
            place: counts the replicas that are preferred to this one for a rollout; 0 means that it is its own.
            unmatched: told the projects of new work that no runner here has credit for.
            clock: monotonic seconds.
        """
        self._table = table
        self._streams = streams
        self._undelivered = undelivered
        self._meter = meter
        self._clock = clock
        self._backlog = Backlog(
            table=table,
            streams=streams,
            poll_interval_s=poll_interval_s,
            predicted_s=predicted_s,
            place=place,
            clock=clock,
        )
        self._ready = self._backlog.ready
        self._quotas = RunningQuotas(table, self._ready)
        self._doubtful: dict[UUID, UUID] = {}
        self._unmatched = unmatched
        self._wake = asyncio.Event()
        # Whether nothing that waits here could be handed to a runner that waits here.
        self._settled = False

    def __len__(self) -> int:
        """Counts the items known to this replica, ready and delayed."""
        return len(self._backlog)

    def update_project(self, project: Project) -> None:
        """Learns a project's weight, quotas and rules."""
        self._backlog.update_project(project)

    def offer(self, items: Iterable[tuple[ReadyItem, float]]) -> None:
        """Adds committed work, each item with the seconds until it may run."""
        if self._backlog.offer(items):
            self._settled = False
        self._wake.set()

    def match_new(
        self, items: Iterable[ReadyItem], besides: Mapping[UUID, UUID] | None = None
    ) -> dict[UUID, RunnerStream]:
        """Finds runners that wait for work that is about to be created, by rollout.

        Nothing is matched while other work could go first. Each match has used a credit: it must be passed on to
        `deliver_new`, `unmatch` or `doubt`. For second attempts of running rollouts, `besides` names the first one's
        session, by rollout.
        """
        matches: dict[UUID, RunnerStream] = {}
        if not self._settled:
            return matches
        for item in items:
            terms = self._ready.terms_of(item.project_id)
            # Whether a quota leaves room is known only to the database; a second attempt needs none.
            if item.rollout_id in matches or (terms.max_running is not None and besides is None):
                continue
            stream = self._streams.next_for(item, terms.rules, besides=(besides or {}).get(item.rollout_id))
            if stream is not None:
                stream.give(item)
                matches[item.rollout_id] = stream
        return matches

    def hedging_projects(self) -> list[int]:
        """Returns the projects whose attempts may be hedged, if there is credit that nothing waits for."""
        idle = self._settled and self._streams.open_credit() > 0
        return [each.project_id for each in self._backlog.projects.values() if idle and each.terms.rules.hedging]

    def deliver_new(self, matches: Mapping[UUID, RunnerStream], grants: Iterable[Grant]) -> None:
        """Hands out the leases that were created; the credit of the other matches is given back."""
        granted = {grant.rollout_id: grant for grant in grants}
        self._deliver([(rollout_id, stream) for rollout_id, stream in matches.items()], granted)
        if self._meter is not None and granted:
            self._meter.dispatched(len(granted), None)

    def unmatch(self, matches: Mapping[UUID, RunnerStream]) -> None:
        """Gives the credit of matches back, of which nothing was created."""
        for stream in matches.values():
            stream.refund()

    def doubt(self, matches: Mapping[UUID, RunnerStream]) -> None:
        """Takes note of matches of which it is not known whether they were created; no runner is told of them."""
        for rollout_id, stream in matches.items():
            self._doubtful[rollout_id] = stream.session_id
            stream.refund()
        self._wake.set()

    def freed(self, projects: Iterable[int]) -> None:
        """Takes note of attempts that ended, each by its project: where there is a quota, there is room again."""
        if self._quotas.ended(projects):
            self._wake.set()

    def add_credit(self, stream: RunnerStream, count: int) -> None:
        """Adds credit to a stream; work that waited for it goes before work that is new."""
        stream.credit += count
        if len(self._ready):
            self._settled = False
            self._wake.set()

    def look(self, projects: frozenset[int]) -> None:
        """Reads the waiting work of projects soon, if there is credit for it: another replica said that there is some."""
        self._backlog.hint(projects)
        self._wake.set()

    def unmatched_labels(self, project_id: int) -> list[tuple[Labels, int]]:
        """Returns the label sets of a project's waiting items that no runner here has, and how many wait for them."""
        return unmatched_labels(self._ready, self._streams.all_open(), project_id)

    async def run(self) -> None:
        """Dispatches until it is cancelled."""
        while True:
            try:
                await self._step()
            except DatabaseUnavailable:
                # Nothing is lost: what was chosen went back, and the table is read again.
                self._backlog.poll_soon()
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _step(self) -> None:
        self._wake.clear()
        if self._doubtful:
            await self._settle_doubtful()
        self._backlog.ripen()
        if self._backlog.poll_is_due():
            self._quotas.look_again()
        # What is known is handed out first: a refill takes a while, and is for credit that finds nothing known.
        # (Before the first one, quotas are not known.)
        if self._backlog.projects and (known := self._match()):
            await self._claim(known)
        await self._backlog.refill()
        choices = self._match()
        if not choices and await self._backlog.take_others():
            choices = self._match()
            if not choices:
                self._backlog.no_others_fit()
        if unmatched := self._backlog.take_unmatched():
            # Other replicas may have credit for it.
            self._unmatched(unmatched)
        self._settled = not choices
        if choices:
            await self._claim(choices)
            return
        if not self._wake.is_set():
            await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._backlog.pause_s()):
                await self._wake.wait()
        except TimeoutError:
            return

    def _match(self) -> list[Choice]:
        waiting_streams = self._streams.with_credit() if len(self._ready) else []
        return match(self._ready, waiting_streams, limit=MAX_CLAIM_ROWS)

    async def _claim(self, choices: list[tuple[ReadyItem, RunnerStream]]) -> None:
        matched = self._clock()
        try:
            grants = await self._quotas.claim(choices)
        except DatabaseUnavailable:
            for item, stream in choices:
                self._doubtful[item.rollout_id] = stream.session_id
                self._ready.push(item)
                stream.refund()
            raise
        self._deliver(
            [(item.rollout_id, stream) for item, stream in choices], {grant.rollout_id: grant for grant in grants}
        )
        if self._meter is not None:
            self._meter.dispatched(len(grants), self._clock() - matched)
        if len(grants) < len(choices):
            self._lose(choices, {grant.rollout_id for grant in grants})

    async def _settle_doubtful(self) -> None:
        """Gives back what a claim leased although its answer was lost: no runner was told of it."""
        held = await self._table.held(list(self._doubtful))
        unknown = [lease for lease in held if self._doubtful[lease.rollout_id] == lease.session_id]
        self._doubtful = {}
        if unknown:
            self._undelivered([released(lease.rollout_id, lease.session_id, lease.epoch) for lease in unknown])

    def _deliver(self, choices: Iterable[tuple[UUID, RunnerStream]], granted: Mapping[UUID, Grant]) -> None:
        per_stream: dict[RunnerStream, list[Grant]] = {}
        for rollout_id, stream in choices:
            grant = granted.get(rollout_id)
            if grant is None:
                stream.refund()
            else:
                per_stream.setdefault(stream, []).append(grant)
        for stream, grants in per_stream.items():
            if stream.closed:
                self._undelivered([released(grant.rollout_id, grant.session_id, grant.epoch) for grant in grants])
                continue
            for grant in grants:
                stream.leases[grant.rollout_id] = grant.epoch
            stream.tell(Assigned(grants=grants))

    def _lose(self, choices: Sequence[Choice], granted: set[UUID]) -> None:
        """Takes note of rows that were taken by another replica, or cancelled, before they were claimed here."""
        # What a quota refused is in the queue again.
        lost = [
            item.project_id
            for item, _ in choices
            if item.rollout_id not in granted and item.rollout_id not in self._ready
        ]
        if self._meter is not None and lost:
            self._meter.claims_lost(len(lost))
        if lost:
            self._backlog.read_again(set(lost))


def released(rollout_id: UUID, session_id: UUID, epoch: int) -> AttemptReport:
    """Makes the report that gives a lease back."""
    return AttemptReport(rollout_id=rollout_id, session_id=session_id, epoch=epoch, kind=FailureKind.RELEASED)
