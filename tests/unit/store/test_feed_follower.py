"""A slow watcher holds one page, never a backlog."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fulmen.ids import uuid7
from fulmen_store.domain.feed import MAX_GROUPS, Cursor, FeedFollower, FeedRow, Selection
from fulmen_store.domain.wakeups import Wakeups


class LongFeed:
    """A feed with many finished rollouts, which counts how often it is read."""

    def __init__(self, count: int) -> None:
        self.rows = [
            FeedRow(cursor=Cursor(xid=number, rollout_id=uuid7()), group_key=None, completes=True)
            for number in range(1, count + 1)
        ]
        self.scans = 0

    async def scan(self, selection: Selection, *, after: Cursor, limit: int) -> list[FeedRow]:
        """Returns rows after a cursor."""
        self.scans += 1
        return self.rows[after.xid : after.xid + limit]

    async def members(self, group_keys: Sequence[UUID]) -> dict[UUID, list[UUID]]:
        """Returns no members: there are no groups."""
        return {}

    async def newest_transaction(self) -> int:
        """Returns a bound of the cursors."""
        return len(self.rows)


async def test_the_next_page_is_read_only_after_the_last_was_taken() -> None:
    feed = LongFeed(10 * MAX_GROUPS)
    follower = FeedFollower(table=feed, wakeups=Wakeups(), poll_interval_s=0.01)
    pages = follower.follow(Selection(project_id=1), Cursor())
    seen = []
    for number in range(1, 11):
        page = await anext(pages)
        assert feed.scans == number
        assert len(page.groups) == MAX_GROUPS
        seen += [group.rollout_ids[0] for group in page.groups]
    assert seen == [row.cursor.rollout_id for row in feed.rows]
    await pages.aclose()
