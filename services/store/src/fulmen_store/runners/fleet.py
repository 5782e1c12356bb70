"""The watch of the fleet: live runner sessions and their changes.

A runner is live while its lease session is; a watch does not extend it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.clock import Clock
from fulmen_store.runners.table import RunnerTable, RunnerView

__all__ = [
    "FleetChanges",
    "FleetWatcher",
]

PAGE: Final = 500
POLL_INTERVAL_S: Final = 1.0
POLL_LIMIT_S: Final = 60.0
KEEP_ALIVE_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChanges:
    """A message to a watcher; empty in a keep-alive."""

    runners: Sequence[RunnerView] = ()
    removed: Sequence[UUID] = ()
    snapshot_complete: bool = False


@dataclass(slots=True)
class _Fleet:
    """The sessions visible to the watchers of one project, as of the last poll."""

    watchers: int = 0
    polls: int = 0
    views: Mapping[UUID, RunnerView] = field(default_factory=dict)
    error: DatabaseUnavailable | None = None
    polled: asyncio.Event = field(default_factory=asyncio.Event)


class FleetWatcher:
    """Background role: polls the fleet once a second while this replica has watchers."""

    def __init__(
        self,
        *,
        table: RunnerTable,
        interval_s: float = POLL_INTERVAL_S,
        clock: Clock | None = None,
    ) -> None:
        """Creates the role; `clock` counts seconds."""
        self._table = table
        self._interval_s = interval_s
        self._clock = (clock or Clock()).monotonic_s
        self._fleets: dict[str | None, _Fleet] = {}
        self._watched = asyncio.Event()

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self._watched.wait()
            for project, fleet in list(self._fleets.items()):
                await self._poll(project, fleet)
            await asyncio.sleep(self._interval_s)

    async def follow(
        self, *, project: str | None, wanted: Callable[[RunnerView], bool], stopping: Callable[[], bool]
    ) -> AsyncGenerator[FleetChanges, None]:
        """Yields the fleet, a mark of its end, then changes, until `stopping`; something at least every 15 s.

        Changes are not queued while a watcher is slow: it gets the state of the next poll.

        Raises:
            DatabaseUnavailable: If the fleet could not be read.
        """
        fleet = self._fleets.setdefault(project, _Fleet())
        fleet.watchers += 1
        self._watched.set()
        try:
            sent: dict[UUID, RunnerView] = {}
            polls, sent_at = 0, self._clock()
            while not stopping():
                await self._next_poll(fleet, polls)
                if fleet.error is not None:
                    raise fleet.error
                changes = _changes(sent, fleet.views, wanted)
                if changes.runners or changes.removed:
                    yield changes
                    sent_at = self._clock()
                if not polls:
                    yield FleetChanges(snapshot_complete=True)
                    sent_at = self._clock()
                elif self._clock() - sent_at >= KEEP_ALIVE_S:
                    yield FleetChanges()
                    sent_at = self._clock()
                polls = fleet.polls
        finally:
            fleet.watchers -= 1
            if not fleet.watchers:
                self._fleets.pop(project, None)
                if not self._fleets:
                    self._watched.clear()

    async def _next_poll(self, fleet: _Fleet, seen: int) -> None:
        try:
            async with asyncio.timeout(POLL_LIMIT_S):
                while fleet.polls == seen:
                    await fleet.polled.wait()
        except TimeoutError:
            raise DatabaseUnavailable("The runners could not be read in time.") from None

    async def _poll(self, project: str | None, fleet: _Fleet) -> None:
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
        fleet.polls += 1
        polled, fleet.polled = fleet.polled, asyncio.Event()
        polled.set()


def _changes(
    sent: dict[UUID, RunnerView], views: Mapping[UUID, RunnerView], wanted: Callable[[RunnerView], bool]
) -> FleetChanges:
    """Returns the changes since the last message, and records them as sent."""
    removed = [session_id for session_id in sent if session_id not in views]
    for session_id in removed:
        del sent[session_id]
    changed = [view for view in views.values() if sent.get(view.session_id) != view and wanted(view)]
    sent.update((view.session_id, view) for view in changed)
    return FleetChanges(runners=changed, removed=removed)
