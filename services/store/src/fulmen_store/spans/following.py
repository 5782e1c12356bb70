"""Follows the chunks of one rollout or attempt while it runs.

Invariant: a chunk is yielded once. The follower remembers the ids of what it has yielded, and not the chunks. While nothing is
new, a poll counts chunks and reads none.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Final
from uuid import UUID

from fulmen.errors import QuotaExceeded
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.spans.table import ChunkHead, SpanParent, SpanTable

__all__ = ["SpanFollower", "spans_key"]

KEEP_ALIVE_S: Final = 15.0
# Spans of an agent's own exporter may come a little after the end of its attempt.
LINGER_S: Final = 3.0
MAX_CHUNKS: Final = 100_000
# Wakeups remember every key that was waited for.
KEYS: Final = 1024


def spans_key(rollout_id: UUID) -> tuple[str, int]:
    """Returns the key that is woken when spans of a rollout are stored; rollouts share keys."""
    return "spans", rollout_id.int % KEYS


class SpanFollower:
    """Follows the chunks of a rollout or attempt."""

    def __init__(
        self, *, table: SpanTable, wakeups: Wakeups, poll_interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Creates the follower; polling finds what other replicas stored. `clock` returns seconds."""
        self._table = table
        self._wakeups = wakeups
        self._poll_interval_s = poll_interval_s
        self._clock = clock

    async def follow(self, parent: SpanParent, *, stopping: Callable[[], bool]) -> AsyncIterator[list[ChunkHead]]:
        """Yields chunks that were not yielded yet, by chunk id; none at once and at least every 15 s, until all is over.

        It ends when the parent is over and no chunk has come for some seconds, or when `stopping`. The next chunks are
        read only after the previous ones were consumed.

        Raises:
            QuotaExceeded: If the parent has more than 100,000 chunks.
        """
        seen: set[tuple[int, UUID]] = set()
        counted = 0
        key = spans_key(parent.rollout_id)
        heard_at, spoke_at = self._clock(), -math.inf
        while not stopping():
            count = self._wakeups.count(key)
            # Asked before the chunks are read: what was stored before the end is among them.
            chunk_count, over = await self._table.watched(parent)
            if chunk_count > MAX_CHUNKS:
                raise QuotaExceeded(
                    f"The rollout has more than {MAX_CHUNKS} chunks of spans: read them with StreamSpans.",
                    quota="chunks of a watched rollout",
                )
            new: list[ChunkHead] = []
            if chunk_count != counted:
                counted = chunk_count
                (heads,) = await self._table.heads([parent])
                new = [head for head in heads if (head.attempt, head.chunk_id) not in seen]
                seen.update((head.attempt, head.chunk_id) for head in new)
            now = self._clock()
            if new:
                heard_at = now
            elif over and now - heard_at >= LINGER_S:
                return
            if new or now - spoke_at >= KEEP_ALIVE_S:
                yield new
                spoke_at = self._clock()
            await self._wakeups.wait(key, since=count, limit_s=self._poll_interval_s)
