"""A slow watcher holds one page, never a backlog."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pytest

from fulmen.ids import uuid7
from fulmen_store.rollouts import feed as feed_module
from fulmen_store.rollouts.feed import MAX_GROUPS, FeedFollower
from fulmen_store.rollouts.feed_cursor import Cursor, Selection
from fulmen_store.rollouts.feed_watch import FeedWatch
from fulmen_store.rollouts.records import NO_RUN
from fulmen_store.rollouts.table import FeedRow


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
    follower = following(feed)
    pages = follower.follow(Selection(project_id=1), Cursor())
    seen = []
    for number in range(1, 11):
        page = await anext(pages)
        assert feed.scans == number
        assert len(page.groups) == MAX_GROUPS
        seen += [group.rollout_ids[0] for group in page.groups]
    assert seen == [row.cursor.rollout_id for row in feed.rows]
    await pages.aclose()


async def test_who_waits_for_a_training_run_is_kept_alive_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "KEEP_ALIVE_S", 0.0)
    numbers = iter([NO_RUN, NO_RUN, 7])

    async def find() -> int:
        return next(numbers)

    assert [run_id async for run_id in following(LongFeed(0)).await_run(1, find)] == [NO_RUN, NO_RUN, 7]


def following(feed: LongFeed) -> FeedFollower:
    """Returns a follower of a feed."""
    return FeedFollower(table=feed, watch=FeedWatch(table=feed, poll_interval_s=0.01))
