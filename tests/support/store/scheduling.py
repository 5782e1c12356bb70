"""Items and streams of runners that tests of the scheduler match."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from fulmen.ids import uuid7
from fulmen_store.rollouts.transitions import RetryPolicy
from fulmen_store.scheduling.fair_queue import ReadyItem
from fulmen_store.scheduling.runner_streams import RunnerStream, RunnerStreams
from tests.support.store.memory_lease_table import MemoryLeaseTable

__all__ = ["new_items", "next_id", "ready_item", "runner_stream"]

POLICY = RetryPolicy(max_attempts=2, retry_mask=0, backoff_ms=0)

_milliseconds = itertools.count(time.time_ns() // 1_000_000)


def next_id() -> UUID:
    """Returns a UUIDv7 of the next millisecond, so that ids are in the order of their creation."""
    return UUID(int=next(_milliseconds) << 80 | 7 << 76 | 2 << 62)


def ready_item(project_id: int = 1, **fields: Any) -> ReadyItem:
    """Makes a waiting item, younger than those before it."""
    return ReadyItem(rollout_id=next_id(), project_id=project_id, **fields)


def new_items(table: MemoryLeaseTable, count: int = 1, *, hedged: bool = False, **fields: Any) -> list[ReadyItem]:
    """Adds equal items to a table."""
    items = [ready_item(**fields) for _ in range(count)]
    for item in items:
        table.add(item, POLICY, hedged=hedged)
    return items


def runner_stream(
    streams: RunnerStreams | None = None,
    *,
    credit: int = 0,
    labels: Iterable[str] = (),
    projects: frozenset[int] | None = None,
) -> RunnerStream:
    """Makes the stream of a runner and attaches it."""
    stream = RunnerStream(session_id=uuid7(), labels=frozenset(labels), projects=projects, credit=credit)
    if streams is not None:
        streams.attach(stream)
    return stream
