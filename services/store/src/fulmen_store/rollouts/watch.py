"""Changes of rollouts for watchers: the last state of each rollout that changed, in order, from a cursor on.

Nothing is written for it but the transaction of a live rollout's last write, in the row that is written anyway. Changes
between two looks are one, and a rollout that changes again after a look is found by the next.

Invariant: a rollout is read after it was found, so what is sent is at least as new as the position that it was found at.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fulmen.errors import CursorInvalid
from fulmen_store.database.database import Database
from fulmen_store.rollouts.feed_cursor import Cursor
from fulmen_store.rollouts.feed_watch import waited

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


class ChangedTable:
    """Finds changed rollouts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def scan(self, project_id: int, *, after: Cursor, limit: int) -> list[Change]:
        """Returns the first rollouts that changed after a position, in order."""
        rows = await self._database.fetch("scan_changes", project_id, after.xid, after.rollout_id, limit)
        return [Change(cursor=Cursor(xid=row["xid"], rollout_id=row["id"]), run_id=row["run_id"]) for row in rows]

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

    def __init__(self, *, table: ChangedTable, pause_s: float = PAUSE_S) -> None:
        """Creates the follower, which looks every `pause_s` seconds."""
        self._table = table
        self._pause_s = pause_s

    async def follow(
        self,
        project_id: int,
        cursor: Cursor | None,
        *,
        find_run: Callable[[], Awaitable[int]] | None = None,
        stopping: asyncio.Event,
    ) -> AsyncIterator[ChangePage]:
        """Yields pages from the cursor on, the first at once, until `stopping`; a page without changes at least every 15 s.

        A page is read only after the previous one was consumed, so a slow watcher holds one page.

        Args:
            project_id: Project.
            cursor: Where to begin; None for now.
            find_run: Returns the number of the training run to which the changes are restricted; None for no restriction.
            stopping: Ends the watch.

        Raises:
            CursorInvalid: If the cursor is ahead of this database.
        """
        if cursor is None:
            cursor = await self._table.present()
        elif cursor.xid > await self._table.newest_transaction():
            raise CursorInvalid("The cursor is from another database.")
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while not stopping.is_set():
            found = await self._table.scan(project_id, after=cursor, limit=SCAN_ROWS)
            cursor = found[-1].cursor if found else cursor
            exhausted = len(found) < SCAN_ROWS
            if find_run is not None:
                # Looked for after the scan: of a run that is unknown even now, there was nothing to find.
                run_id = await find_run()
                found = [change for change in found if change.run_id == run_id]
            if found or clock() >= due_s:
                yield ChangePage(changes=found, cursor=cursor)
                due_s = clock() + KEEP_ALIVE_S
            if exhausted:
                await waited(stopping, self._pause_s)
