"""Changes of rollouts for watchers: the last state of each rollout that changed, in order, from a cursor on.

Nothing is written for it but the transaction of a live rollout's last write, in the row that is written anyway. Changes
between two looks are one, and a rollout that changes again after a look is found by the next. Watchers of a project share
its looks; one that resumes, or is slow, looks by itself until it has caught up.

Invariants: a rollout is read after it was found, so what is sent is at least as new as the position that it was found at. A
watcher that has the news of number n, and then looked itself, misses nothing: what it did not see is in later looks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fulmen.errors import CursorInvalid
from fulmen_store.database.database import Database
from fulmen_store.looks import Looked, Looks, Shared
from fulmen_store.rollouts.feed_cursor import Cursor

__all__ = [
    "Change",
    "ChangeFollower",
    "ChangePage",
    "ChangeSelection",
    "ChangedTable",
]

SCAN_ROWS: Final = 512
KEEP_ALIVE_S: Final = 15.0
# Changes of this time are one look, and often one change.
PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSelection:
    """The rollouts that a watcher follows: those of a project, or of one of its training runs, by name."""

    project_id: int
    training_run: str = ""

    def digest(self) -> bytes:
        """Returns 4 bytes that identify the selection."""
        return hashlib.sha256(f"changes/{self.project_id}/{self.training_run}".encode()).digest()[:4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A rollout that changed, the number of its training run, and the position of its last change."""

    cursor: Cursor
    run_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePage:
    """Changed rollouts of a selection, in order, and the cursor after all that were looked at; none in a keep-alive."""

    changes: Sequence[Change]
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Changes after a position, in order.

    Attributes:
        cursor: The position that everything before it was looked at.
        exhausted: Whether there were no more changes.
    """

    changes: Sequence[Change]
    cursor: Cursor
    exhausted: bool


class ChangedTable:
    """Finds changed rollouts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def scan(self, project_id: int, *, after: Cursor, limit: int) -> Scan:
        """Returns the first rollouts that changed after a position, in order."""
        rows = await self._database.fetch("scan_changes", project_id, after.xid, after.rollout_id, limit)
        found = [
            Change(cursor=Cursor(xid=row["xid"], rollout_id=row["id"]), run_id=row["run_id"])
            for row in rows
            if row["id"] is not None
        ]
        if len(found) == limit:
            return Scan(changes=found, cursor=found[-1].cursor, exhausted=False)
        # All that is behind the oldest running transaction was seen.
        return Scan(changes=found, cursor=max(after, Cursor(xid=rows[0]["settled"])), exhausted=True)

    async def present(self) -> Cursor:
        """Returns a position that all later changes are behind."""
        row = await self._database.fetch_row("oldest_transaction")
        assert row is not None
        return Cursor(xid=int(row[0]))

    async def newest_transaction(self) -> int:
        """Returns an upper bound of all transaction ids so far."""
        row = await self._database.fetch_row("newest_transaction")
        assert row is not None
        return int(row[0])


class ChangeFollower:
    """Follows changes for watchers."""

    def __init__(self, *, table: ChangedTable, stopping: asyncio.Event, pause_s: float = PAUSE_S) -> None:
        """Creates the follower, which looks every `pause_s` seconds at each project that has watchers, until `stopping`."""
        self._table = table
        self._stopping = stopping
        self._looks: Looks[int, Scan] = Looks(self._look, pause_s=pause_s, stopping=stopping)

    async def follow(
        self,
        project_id: int,
        cursor: Cursor | None,
        *,
        find_run: Callable[[], Awaitable[int]] | None = None,
    ) -> AsyncGenerator[ChangePage, None]:
        """Yields pages from the cursor on, the first immediately, until the shutdown; a page without changes at least every
        15 s.

        A page is read only after the previous one was consumed, so a slow watcher holds one page.

        Args:
            project_id: Project.
            cursor: Where to begin; None for now.
            find_run: Returns the number of the training run to which the changes are restricted; None for no restriction.

        Raises:
            CursorInvalid: If the cursor is ahead of this database.
        """
        if cursor is None:
            cursor = await self._table.present()
        elif cursor.xid > await self._table.newest_transaction():
            raise CursorInvalid("The cursor is from another database.")
        clock = asyncio.get_running_loop().time
        due_s = clock()
        with self._looks.watching(project_id) as shared:
            reader = _Reader(self._table, project_id, cursor, shared)
            while not self._stopping.is_set():
                scan = await reader.read(due_s - clock())
                changes = scan.changes
                if find_run is not None and changes:
                    # Looked for after the scan: of a run that is unknown even now, there was nothing to find.
                    run_id = await find_run()
                    changes = [change for change in changes if change.run_id == run_id]
                if changes or clock() >= due_s:
                    yield ChangePage(changes=changes, cursor=scan.cursor)
                    due_s = clock() + KEEP_ALIVE_S

    async def _look(self, project_id: int, last: Scan | None) -> Looked[Scan]:
        """Looks once. The first look finds nothing but the position of the next; later ones keep the last changes found."""
        if last is None:
            first = Scan(changes=(), cursor=await self._table.present(), exhausted=True)
            return Looked(seen=first, is_news=True)
        scan = await self._table.scan(project_id, after=last.cursor, limit=SCAN_ROWS)
        if not scan.changes:
            return Looked(seen=replace(scan, changes=last.changes), is_news=False)
        return Looked(seen=scan, is_news=True, has_more=not scan.exhausted)


class _Reader:
    """Reads changes for one watcher: of the shared looks once it has caught up."""

    def __init__(self, table: ChangedTable, project_id: int, cursor: Cursor, shared: Shared[Scan]) -> None:
        self._table = table
        self._project_id = project_id
        self._cursor = cursor
        self._shared = shared
        self._number = 0
        self._has_caught_up = False

    async def read(self, limit_s: float) -> Scan:
        """Returns what changed after the last read, possibly nothing; waits for a change for at most `limit_s` seconds."""
        shared = self._shared
        if not shared.number:
            # Looks begin where the first one found the present to be: what this reader finds itself must reach as far.
            await shared.wait(0, KEEP_ALIVE_S)
        if self._has_caught_up:
            await shared.wait(self._number, limit_s)
        seen, missed, self._number = shared.seen, shared.number - self._number, shared.number
        if self._has_caught_up and seen is not None and missed <= 1:
            changes = [change for change in seen.changes if change.cursor > self._cursor] if missed else []
            self._cursor = max(self._cursor, seen.cursor)
            return Scan(changes=changes, cursor=self._cursor, exhausted=True)
        scan = await self._table.scan(self._project_id, after=self._cursor, limit=SCAN_ROWS)
        self._cursor = scan.cursor
        # Without a first look, it may begin behind this scan.
        self._has_caught_up = scan.exhausted and self._number > 0
        return scan
