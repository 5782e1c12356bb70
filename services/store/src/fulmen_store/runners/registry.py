"""Who runs: what runners say of themselves, written down with their renewals, and the watch of the fleet.

Presence is the lease session itself; nothing here keeps a runner alive. Loads and counts wait in memory for the next
renewal: a replica that is killed loses those of a few seconds.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.periodic import Pace
from fulmen_store.rollouts.transitions import FailureKind

__all__ = ["FleetChanges", "RunnerBoard", "RunnerTable", "RunnerView", "SessionNotes", "SignOfLife"]

PAGE: Final = 500
LOOK_INTERVAL_S: Final = 1.0
LOOK_LIMIT_S: Final = 60.0
KEEP_ALIVE_S: Final = 15.0

_NOT_COUNTED: Final = frozenset({FailureKind.CANCELLED, FailureKind.RELEASED, FailureKind.SUPERSEDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class SignOfLife:
    """What is written down of a session at once.

    Attributes:
        heard: whether the runner was heard, which extends the session.
        load: what it said of its load, opaque here; None leaves what it said before.
        ended: how many of its attempts ended since the last time.
        failed: how many of these failed.
    """

    session_id: UUID
    heard: bool
    load: bytes | None = None
    ended: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Note:
    load: bytes | None = None
    ended: int = 0
    failed: int = 0


class SessionNotes:
    """What is to be written down of sessions with the next renewal."""

    def __init__(self) -> None:
        self._notes: dict[UUID, _Note] = {}

    def load(self, session_id: UUID, load: bytes) -> None:
        """Notes how busy a runner says it is."""
        self._notes.setdefault(session_id, _Note()).load = load

    def ended(self, attempts: Iterable[EndedAttempt]) -> None:
        """Counts ended attempts; those that were given back, cancelled or superseded say nothing of the runner."""
        for attempt in attempts:
            if attempt.kind not in _NOT_COUNTED:
                note = self._notes.setdefault(attempt.session_id, _Note())
                note.ended += 1
                note.failed += attempt.kind is not FailureKind.NONE

    def take(self, heard: Iterable[UUID]) -> list[SignOfLife]:
        """Returns what there is to write of the sessions that were heard, and of those with notes."""
        notes, self._notes = self._notes, {}
        alive = set(heard)
        empty = _Note()
        return [
            SignOfLife(
                session_id=session_id,
                heard=session_id in alive,
                load=(note := notes.get(session_id, empty)).load,
                ended=note.ended,
                failed=note.failed,
            )
            for session_id in sorted(alive | notes.keys())
        ]

    def put_back(self, signs: Iterable[SignOfLife]) -> None:
        """Notes again what could not be written; what was said since then is newer."""
        for sign in signs:
            if sign.load is None and not sign.ended:
                continue
            note = self._notes.setdefault(sign.session_id, _Note())
            note.load = sign.load if note.load is None else note.load
            note.ended += sign.ended
            note.failed += sign.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerView:
    """A live runner session. That it was renewed is no change of it.

    Attributes:
        info: how it described itself, opaque here.
        running: how many attempts it runs.
        attempts: the first of them, as (rollout, epoch).
        load: what it said last of its load, opaque here; None if it never did.
        ended: how many of its attempts have ended.
        failed: how many of these failed.
    """

    session_id: UUID
    info: bytes
    opened_at: datetime.datetime
    lease_until: datetime.datetime = field(compare=False)
    running: int
    attempts: Sequence[tuple[UUID, int]]
    load: bytes | None
    ended: int
    failed: int


class RunnerTable(Protocol):
    """Where sessions are read."""

    async def page(self, *, after: UUID, limit: int, project: str | None) -> list[RunnerView]:
        """Returns live sessions that may serve a project, oldest first, with what they run of it; None: all."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChanges:
    """What a watcher is told; empty in a keep-alive."""

    runners: Sequence[RunnerView] = ()
    removed: Sequence[UUID] = ()
    snapshot_complete: bool = False


@dataclass(slots=True)
class _Fleet:
    """The sessions that the watchers of one project see, as they were at the last look."""

    watchers: int = 0
    looks: int = 0
    views: Mapping[UUID, RunnerView] = field(default_factory=dict)
    error: DatabaseUnavailable | None = None
    looked: asyncio.Event = field(default_factory=asyncio.Event)


class RunnerBoard:
    """Background role: looks at the fleet for all watchers of this replica, once a second while there are any."""

    def __init__(
        self,
        *,
        table: RunnerTable,
        interval_s: float = LOOK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wires the role; `clock` counts seconds."""
        self._table = table
        self._interval_s = interval_s
        self._clock = clock
        self._fleets: dict[str | None, _Fleet] = {}
        self._watched = asyncio.Event()

    async def run(self) -> None:
        """Looks until it is cancelled."""
        pace = Pace(self._interval_s)
        while True:
            await self._watched.wait()
            for project, fleet in list(self._fleets.items()):
                await self._look(project, fleet)
            await pace.next()

    async def follow(
        self, *, project: str | None, wanted: Callable[[RunnerView], bool], stopping: Callable[[], bool]
    ) -> AsyncGenerator[FleetChanges, None]:
        """Yields the fleet, a mark of its end, then changes, until `stopping`; something at least every 15 s.

        What happens while the last answer is not taken is looked at again, not queued.

        Raises:
            DatabaseUnavailable: if the fleet could not be looked at.
        """
        fleet = self._fleets.setdefault(project, _Fleet())
        fleet.watchers += 1
        self._watched.set()
        try:
            told: dict[UUID, RunnerView] = {}
            looks, told_at = 0, self._clock()
            while not stopping():
                await self._next_look(fleet, looks)
                if fleet.error is not None:
                    raise fleet.error
                changes = _changes(told, fleet.views, wanted)
                if changes.runners or changes.removed:
                    yield changes
                    told_at = self._clock()
                if not looks:
                    yield FleetChanges(snapshot_complete=True)
                    told_at = self._clock()
                elif self._clock() - told_at >= KEEP_ALIVE_S:
                    yield FleetChanges()
                    told_at = self._clock()
                looks = fleet.looks
        finally:
            fleet.watchers -= 1
            if not fleet.watchers:
                self._fleets.pop(project, None)
                if not self._fleets:
                    self._watched.clear()

    async def _next_look(self, fleet: _Fleet, seen: int) -> None:
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                while fleet.looks == seen:
                    await fleet.looked.wait()
        except TimeoutError:
            raise DatabaseUnavailable("The runners could not be looked at in time.") from None

    async def _look(self, project: str | None, fleet: _Fleet) -> None:
        views: dict[UUID, RunnerView] = {}
        after = UUID(int=0)
        fleet.error = None
        try:
            while page := await self._table.page(after=after, limit=PAGE, project=project):
                views.update((view.session_id, view) for view in page)
                after = page[-1].session_id
                if len(page) < PAGE:
                    break
        except DatabaseUnavailable as error:
            fleet.error = error
        else:
            fleet.views = views
        fleet.looks += 1
        looked, fleet.looked = fleet.looked, asyncio.Event()
        looked.set()


def _changes(
    told: dict[UUID, RunnerView], views: Mapping[UUID, RunnerView], wanted: Callable[[RunnerView], bool]
) -> FleetChanges:
    """Returns what a watcher does not know yet, and notes that it is told."""
    removed = [session_id for session_id in told if session_id not in views]
    for session_id in removed:
        del told[session_id]
    changed = [view for view in views.values() if told.get(view.session_id) != view and wanted(view)]
    told.update((view.session_id, view) for view in changed)
    return FleetChanges(runners=changed, removed=removed)
