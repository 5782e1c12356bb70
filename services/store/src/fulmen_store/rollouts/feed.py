"""The completion feed: finished groups, each complete, exactly once per chain of cursors, in the same order for all.

The order is (transaction id, rollout id) of the row that completed the group. Rows are read only below the oldest
running transaction, so none can appear behind a cursor although transactions commit out of order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.errors import CursorInvalid
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.rollouts.feed_watch import FeedWatch
from fulmen_store.rollouts.records import NO_RUN
from fulmen_store.rollouts.table import FeedTable
from fulmen_store.waiting import waited

__all__ = [
    "FeedFollower",
    "FeedPage",
    "FinishedGroup",
]

SCAN_ROWS: Final = 512
MAX_GROUPS: Final = 256
KEEP_ALIVE_S: Final = 15.0
# A project has news of other runs than the one that is waited for: look for it soon, then ever less often.
FIRST_PAUSE_S: Final = 0.005
MAX_PAUSE_S: Final = 0.5
PAUSE_GROWTH: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A finished group: its members, by id, and the cursor after it."""

    cursor: Cursor
    rollout_ids: Sequence[UUID]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPage:
    """Finished groups and the cursor after them; without groups in a keep-alive."""

    groups: Sequence[FinishedGroup]
    cursor: Cursor


class FeedFollower:
    """Follows the feed for watchers."""

    def __init__(self, *, table: FeedTable, watch: FeedWatch) -> None:
        """Creates the follower; `watch` reports when there may be something to read."""
        self._table = table
        self._watch = watch

    async def follow(
        self, selection: Selection, cursor: Cursor, *, stopping: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[FeedPage]:
        """Yields pages from the cursor on, until `stopping`; a page without groups at least every 15 s.

        A page is read only after the previous one was consumed, so a slow watcher holds one page.

        Raises:
            CursorInvalid: If the cursor is ahead of this database.
        """
        if cursor.xid and cursor.xid > await self._table.newest_transaction():
            raise CursorInvalid("The cursor is from another database.")
        clock = asyncio.get_running_loop().time
        with self._watch.watching(selection.project_id, selection.run_id) as news:
            due_s = clock() + KEEP_ALIVE_S
            while not stopping():
                news.clear()
                page, exhausted = await self._read(selection, cursor)
                cursor = page.cursor
                if page.groups or clock() >= due_s:
                    yield page
                    due_s = clock() + KEEP_ALIVE_S
                if exhausted:
                    await waited(news, due_s - clock())

    async def await_run(
        self, project_id: int, find: Callable[[], Awaitable[int]], *, stopping: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[int]:
        """Waits for the first end of a training run: yields `NO_RUN` at least every 15 s until then, then its number.

        Args:
            project_id: Project.
            find: Returns the number, or `NO_RUN` while the run is unknown.
            stopping: Predicate that ends the wait.
        """
        clock = asyncio.get_running_loop().time
        pause_s = FIRST_PAUSE_S
        with self._watch.watching(project_id, None) as news:
            due_s = clock() + KEEP_ALIVE_S
            while not stopping():
                news.clear()
                run_id = await find()
                if run_id != NO_RUN:
                    yield run_id
                    return
                if clock() >= due_s:
                    yield NO_RUN
                    due_s = clock() + KEEP_ALIVE_S
                if await waited(news, due_s - clock()):
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * PAUSE_GROWTH, MAX_PAUSE_S)

    async def _read(self, selection: Selection, cursor: Cursor) -> tuple[FeedPage, bool]:
        rows = await self._table.scan(selection, after=cursor, limit=SCAN_ROWS)
        complete = [row for row in rows if row.completes]
        exhausted = len(rows) < SCAN_ROWS and len(complete) <= MAX_GROUPS
        if len(complete) > MAX_GROUPS:
            complete = complete[:MAX_GROUPS]
            rows = rows[: rows.index(complete[-1]) + 1]
        keys = [row.group_key for row in complete if row.group_key is not None]
        members = await self._table.members(keys) if keys else {}
        groups = [
            FinishedGroup(
                cursor=row.cursor,
                rollout_ids=[row.cursor.rollout_id] if row.group_key is None else members[row.group_key],
            )
            for row in complete
        ]
        return FeedPage(groups=groups, cursor=rows[-1].cursor if rows else cursor), exhausted
