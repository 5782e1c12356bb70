"""Follows the chunks of one rollout or attempt while it runs.

Invariant: a chunk is yielded once. The follower remembers the ids of yielded chunks, not the chunks. While nothing is new, a
poll counts chunks and reads none. Polls fall on the same moments for all watchers of a replica, so that one statement looks
for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.errors import CursorInvalid, QuotaExceeded
from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.spans.table import ChunkHead, SpanParent, SpanTable, Watched

__all__ = ["Followed", "SpanFollower", "spans_key"]

KEEP_ALIVE_S: Final = 15.0
# Spans of an agent's own exporter may come a little after the end of its attempt.
LINGER_S: Final = 3.0
MAX_CHUNKS: Final = 100_000
# Wakeups remember every key that was waited for.
KEYS: Final = 1024
# Of one statement: each parent may be of a day of its own.
MAX_LOOKS: Final = 256


def spans_key(rollout_id: UUID) -> tuple[str, int]:
    """Returns the key that is woken when spans of a rollout are stored; rollouts share keys."""
    return "spans", rollout_id.int % KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Chunks that were not yielded before, and the transaction to resume after: what older ones wrote was yielded."""

    heads: Sequence[ChunkHead]
    settled: int


class SpanFollower:
    """Follows the chunks of rollouts or attempts.

    Attributes:
        looks: Background role: looks for all watchers that ask at the same time.
    """

    def __init__(
        self, *, table: SpanTable, wakeups: Wakeups, poll_interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Creates the follower; polling finds what other replicas stored. `clock` returns seconds."""
        self._table = table
        self._wakeups = wakeups
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self.looks: GroupCommitter[SpanParent, Watched] = GroupCommitter(
            "watch_spans", table.watched, max_rows=MAX_LOOKS
        )

    async def follow(
        self, parent: SpanParent, *, since: int = 0, stopping: Callable[[], bool]
    ) -> AsyncIterator[Followed]:
        """Yields chunks that were not yielded yet, by chunk id; an empty list immediately and at least every 15 s, until
        the end.

        It ends when the parent is over and no chunk has come for some seconds, or when `stopping`. The next chunks are
        read only after the previous ones were consumed.

        Args:
            parent: What is followed.
            since: The `settled` of an earlier watch, to leave out what it yielded; 0 for all.
            stopping: Whether to end now.

        Raises:
            CursorInvalid: If `since` is of another database.
            QuotaExceeded: If the parent has more than 100,000 chunks.
        """
        seen: set[tuple[int, UUID]] = set()
        counted, settled = -1, since
        key = spans_key(parent.rollout_id)
        heard_at, spoke_at = self._clock(), -math.inf
        while not stopping():
            count = self._wakeups.count(key)
            # Looked before the chunks are read: what was stored before the end is among them.
            (look,) = await self.looks.submit([parent])
            if since > look.settled:
                raise CursorInvalid("The cursor is from another database.")
            if look.chunk_count > MAX_CHUNKS:
                raise QuotaExceeded(
                    f"The rollout has more than {MAX_CHUNKS} chunks of spans: read them with StreamSpans.",
                    quota="chunks of a watched rollout",
                )
            new: list[ChunkHead] = []
            if look.chunk_count != counted:
                counted = look.chunk_count
                (heads,) = await self._table.heads([parent], since=settled) if counted else ([],)
                new = [head for head in heads if (head.attempt, head.chunk_id) not in seen]
                seen.update((head.attempt, head.chunk_id) for head in new)
                settled = look.settled
            now = self._clock()
            if new:
                heard_at = now
            elif look.is_over and now - heard_at >= LINGER_S:
                return
            if new or now - spoke_at >= KEEP_ALIVE_S:
                yield Followed(heads=new, settled=settled)
                spoke_at = self._clock()
            await self._wakeups.wait(key, since=count, limit_s=self._pause_s())

    def _pause_s(self) -> float:
        """Returns the time to the next poll of all watchers, seconds."""
        return self._poll_interval_s - self._clock() % self._poll_interval_s
