"""Background role: assigns waiting rollouts to runners with credit.

The dispatcher chooses assignments in memory for speed, and claims the whole batch by compare-and-set in one commit for
safety. A choice whose row another replica claimed first is not granted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.clock import Clock
from fulmen_store.events import QueueEvents
from fulmen_store.leases.leases import AttemptReport, EndedAttempt, Grant, LeasedAttempt, LeaseTable, Project
from fulmen_store.metrics import StoreMetrics
from fulmen_store.replicas.live_replicas import LiveReplicas
from fulmen_store.rollouts.transitions import FailureKind
from fulmen_store.scheduling.backlog import Backlog
from fulmen_store.scheduling.durations import DurationTracker
from fulmen_store.scheduling.fair_queue import Labels, ReadyItem
from fulmen_store.scheduling.matching import Choice, match, unmatched_labels
from fulmen_store.scheduling.quotas import RunningQuotas
from fulmen_store.scheduling.runner_streams import Assigned, RunnerStream, RunnerStreams

__all__ = ["Dispatcher", "released"]

MAX_CLAIM_ROWS: Final = 1000
RETRY_PAUSE_S: Final = 0.2


class Dispatcher:
    """Matches ready items with credit, claims them, and puts the grants into the runners' outboxes."""

    def __init__(
        self,
        *,
        table: LeaseTable,
        streams: RunnerStreams,
        events: QueueEvents,
        poll_interval_s: float,
        replicas: LiveReplicas | None = None,
        durations: DurationTracker | None = None,
        metrics: StoreMetrics | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Creates a dispatcher with an empty backlog.

        Args:
            table: Table of leases.
            streams: Streams of the runners connected here.
            events: Receiver of undelivered leases and unmatched work.
            poll_interval_s: Interval of polls for other replicas' work while credit is idle, seconds.
            replicas: Live replicas that share the backlog; by default only this one.
            durations: Predicted durations by task type; by default unknown.
            metrics: Instruments; by default none.
            clock: Clock; by default the system's.
        """
        self._table = table
        self._streams = streams
        self._events = events
        self._metrics = metrics
        self._clock = clock or Clock()
        self._backlog = Backlog(
            table=table,
            streams=streams,
            poll_interval_s=poll_interval_s,
            replicas=replicas,
            durations=durations,
            clock=self._clock,
        )
        self._ready = self._backlog.ready
        self._quotas = RunningQuotas(table, self._ready)
        # Sessions of claims with an unknown outcome, by rollout.
        self._in_doubt: dict[UUID, UUID] = {}
        self._wake = asyncio.Event()
        # True if no waiting item can be matched with a waiting runner.
        self._settled = False

    def __len__(self) -> int:
        """Returns the number of items known to this replica, ready and delayed."""
        return len(self._backlog)

    def update_project(self, project: Project) -> None:
        """Applies a project's weight, quotas, rules and pauses."""
        if self._backlog.update_project(project):
            self._settled = False
            self._wake.set()

    def offer(self, items: Iterable[tuple[ReadyItem, float]]) -> None:
        """Adds committed items, each with its delay in seconds."""
        if self._backlog.offer(items):
            self._settled = False
        self._wake.set()

    def match_new(
        self, items: Iterable[ReadyItem], exclude: Mapping[UUID, UUID] | None = None
    ) -> dict[UUID, RunnerStream]:
        """Finds waiting runners for rollouts that are about to be created; returns their streams by rollout.

        Matches nothing while other work could go first. Each match uses a credit and must be passed to `deliver_new`,
        `unmatch` or `mark_in_doubt`.

        Args:
            items: New rollouts, or running ones that need a second attempt.
            exclude: For second attempts, sessions of the first attempts by rollout.
        """
        matches: dict[UUID, RunnerStream] = {}
        if not self._settled:
            return matches
        for item in items:
            terms = self._ready.terms_of(item.project_id)
            # Only the database knows whether a quota has room; a second attempt needs none.
            if item.rollout_id in matches or (terms.max_running is not None and exclude is None):
                continue
            if terms.is_paused or item.agent in terms.paused_agents:
                continue
            stream = self._streams.next_for(item, terms.rules, exclude=(exclude or {}).get(item.rollout_id))
            if stream is not None:
                stream.assign(item)
                matches[item.rollout_id] = stream
        return matches

    def hedging_projects(self) -> list[int]:
        """Returns the projects whose attempts may be hedged; empty unless credit is idle."""
        idle = self._settled and self._streams.open_credit() > 0
        return [each.project_id for each in self._backlog.projects.values() if idle and each.terms.rules.hedging]

    def deliver_new(self, matches: Mapping[UUID, RunnerStream], grants: Iterable[Grant]) -> None:
        """Delivers the created leases and refunds the credit of the other matches."""
        granted = {grant.rollout_id: grant for grant in grants}
        self._deliver(matches.items(), granted)
        if self._metrics is not None and granted:
            self._metrics.dispatched(len(granted), None)

    def unmatch(self, matches: Mapping[UUID, RunnerStream]) -> None:
        """Refunds the credit of matches for which no lease was created."""
        for rollout_id, stream in matches.items():
            stream.refund(rollout_id)

    def mark_in_doubt(self, matches: Mapping[UUID, RunnerStream]) -> None:
        """Records matches with an unknown commit outcome; leases found later are released, not delivered."""
        for rollout_id, stream in matches.items():
            self._in_doubt[rollout_id] = stream.session_id
            stream.refund(rollout_id)
        self._wake.set()

    def attempts_ended(self, ended: Sequence[EndedAttempt]) -> None:
        """Updates the running quotas, in which ended attempts make room, and serves runners that become idle."""
        has_room = self._quotas.ended(attempt.item.project_id for attempt in ended)
        streams = (self._streams.find(attempt.session_id) for attempt in ended) if len(self._ready) else ()
        if has_room or any(stream is not None and stream.alone and not stream.leases for stream in streams):
            self._wake.set()

    def add_credit(self, stream: RunnerStream, count: int) -> None:
        """Adds credit to a stream; waiting items are served before new ones."""
        stream.credit += count
        if len(self._ready):
            self._settled = False
            self._wake.set()

    def make_room(self, stream: RunnerStream) -> None:
        """Records that everything assigned to a stream was sent."""
        was_full = stream.credit > 0 and not stream.can_take
        stream.make_room()
        if was_full and len(self._ready):
            self._settled = False
            self._wake.set()

    def hint(self, projects: frozenset[int]) -> None:
        """Schedules a read of the projects' waiting rows, if credit waits."""
        self._backlog.hint(projects)
        self._wake.set()

    def read_again(self, projects: Iterable[int]) -> None:
        """Reads projects again in which rows may run earlier than they could when they were read."""
        self._backlog.forget_delays(projects)
        self._settled = False
        self._wake.set()

    def open_credit(self, project_id: int) -> int:
        """Returns the unused credit of the runners connected here that serve a project."""
        return self._streams.open_credit(project_id)

    def unmatched_labels(self, project_id: int) -> list[tuple[Labels, int]]:
        """Returns the label sets required by a project's waiting items that no runner here has, with their counts."""
        return unmatched_labels(self._ready, self._streams.all_open(), project_id)

    async def run(self) -> None:
        """Dispatches until cancelled."""
        while True:
            try:
                await self._step()
            except DatabaseUnavailable:
                # Nothing is lost: the choices are back in the queue, and the table is reread.
                self._backlog.poll_soon()
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _step(self) -> None:
        self._wake.clear()
        if self._in_doubt:
            await self._settle_in_doubt()
        self._backlog.ripen()
        if self._backlog.poll_is_due():
            self._quotas.probe_again()
        # Assign known items before a refill, which is slow and serves only credit without a known item. Before the
        # first refill the quotas are unknown.
        if self._backlog.projects and (known := self._match()):
            await self._claim(known)
        await self._backlog.refill()
        choices = self._match()
        if not choices and await self._backlog.steal():
            choices = self._match()
            if not choices:
                self._backlog.nothing_to_steal()
        if unmatched := self._backlog.drain_unmatched():
            # Other replicas may have credit for them.
            self._events.work_unmatched.emit(unmatched)
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
        with_credit = self._streams.with_credit() if len(self._ready) else []
        return match(self._ready, with_credit, limit=MAX_CLAIM_ROWS)

    async def _claim(self, choices: list[Choice]) -> None:
        matched_at = self._clock.monotonic_s()
        try:
            grants = await self._quotas.claim(choices)
        except DatabaseUnavailable:
            for item, stream in choices:
                self._in_doubt[item.rollout_id] = stream.session_id
                self._ready.push(item)
                stream.refund(item.rollout_id)
            raise
        granted = {grant.rollout_id: grant for grant in grants}
        self._deliver([(item.rollout_id, stream) for item, stream in choices], granted)
        if self._metrics is not None:
            self._metrics.dispatched(len(grants), self._clock.monotonic_s() - matched_at)
        if len(grants) < len(choices):
            self._handle_lost(choices, granted)

    async def _settle_in_doubt(self) -> None:
        """Releases leases of claims with an unknown outcome, which the runners never received."""
        held = await self._table.held(list(self._in_doubt))
        unknown = [lease for lease in held if self._in_doubt[lease.rollout_id] == lease.session_id]
        self._in_doubt = {}
        if unknown:
            self._events.leases_undelivered.emit([released(lease.attempt, lease.session_id) for lease in unknown])

    def _deliver(self, choices: Iterable[tuple[UUID, RunnerStream]], granted: Mapping[UUID, Grant]) -> None:
        per_stream: dict[RunnerStream, list[Grant]] = {}
        for rollout_id, stream in choices:
            grant = granted.get(rollout_id)
            if grant is None:
                stream.refund(rollout_id)
            else:
                per_stream.setdefault(stream, []).append(grant)
        for stream, grants in per_stream.items():
            if stream.closed:
                self._events.leases_undelivered.emit([released(grant.attempt, grant.session_id) for grant in grants])
                continue
            for grant in grants:
                stream.lease(grant.attempt)
            stream.send(Assigned(grants=grants))

    def _handle_lost(self, choices: Sequence[Choice], granted: Mapping[UUID, Grant]) -> None:
        """Rereads projects in which another replica claimed a chosen row first, or the row was cancelled."""
        # Items refused by a quota are back in the queue.
        lost = [
            item.project_id
            for item, _ in choices
            if item.rollout_id not in granted and item.rollout_id not in self._ready
        ]
        if self._metrics is not None and lost:
            self._metrics.claims_lost(len(lost))
        if lost:
            self._backlog.read_again(set(lost))


def released(attempt: LeasedAttempt, session_id: UUID) -> AttemptReport:
    """Creates the report that releases a lease."""
    return AttemptReport(
        project_id=attempt.project_id,
        rollout_id=attempt.rollout_id,
        session_id=session_id,
        epoch=attempt.epoch,
        kind=FailureKind.RELEASED,
    )
