"""Segments of spans that tests write, look at and damage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulmen.store.v1 import span_pb2
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen_store.clock import Clock
from fulmen_store.database.database import Database
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.names import ProjectNames
from fulmen_store.segments.mover import SegmentMover
from fulmen_store.segments.table import SegmentTable
from fulmen_store.spans.blobs import Blobs, open_storage
from fulmen_store.spans.table import SpanTable
from tests.support.store.running import Runner, Stubs, create
from tests.support.store.spans import append, packed, span

__all__ = ["Counted", "Tomorrow", "ended_rollouts", "files_in", "mover_of", "read_all", "rows", "spanned", "table_of"]

DAY_S = 86_400.0


class Tomorrow(Clock):
    """A clock for which the rollouts that are made now are of a day that is over."""

    unix_s = staticmethod(lambda: time.time() + DAY_S)


class Counted(StoreMetrics):
    """Instruments that remember what could not be read."""

    unreadable = 0

    def chunk_unreadable(self) -> None:
        self.unreadable += 1


def table_of(database: Database, url: str, metrics: StoreMetrics | None = None) -> SpanTable:
    """Makes a table of chunks as the store does."""
    return SpanTable(database, ProjectNames(database), blobs=Blobs(open_storage(url)), metrics=metrics)


def mover_of(database: Database, url: str, *, clock: Clock | None = None, **settings: Any) -> SegmentMover:
    """Makes the role of one more replica, which moves what has ended, at once and of days that are over."""
    values: dict[str, Any] = {"segment_bytes": 32 * 1024 * 1024, "after_s": 0.0} | settings
    return SegmentMover(
        table=SegmentTable(database), blobs=Blobs(open_storage(url)), read_chunks=table_of(database, url).read_rows,
        metrics=StoreMetrics(), clock=clock or Tomorrow(), **values,
    )  # fmt: skip


async def ended_rollouts(stubs: Stubs, count: int, **fields: Any) -> list[str]:
    """Creates rollouts and ends them; returns the names of their attempts, in the order of ids."""
    names = await create(stubs, count, **fields)
    runner = await Runner(stubs).open()
    taken = await runner.take(count)
    await runner.complete(taken)
    assert {one.rollout.name for one in taken} == set(names)
    return sorted(one.attempt for one in taken)


async def spanned(
    stubs: Stubs, attempts: Sequence[str], *, chunks: int = 2, spans: int = 3
) -> list[span_pb2.SpanChunk]:
    """Appends chunks to attempts, and returns them."""
    made = [
        packed(attempt, *(span(f"{number}.{each}", start=1 + each, seconds=1) for each in range(spans)))
        for attempt in attempts
        for number in range(chunks)
    ]
    assert (await append(stubs, *made)).accepted_count == len(made)
    return made


async def rows(connection: Any, table: str) -> int:
    """Returns the number of rows of a table."""
    found: int = await connection.fetchval(f"select count(*) from {table}")
    return found


def files_in(folder: Path) -> list[Path]:
    """Returns all objects of a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What every way of reading gives for some rollouts."""

    streamed: list[bytes]
    filtered: list[bytes]
    listed: list[bytes]
    watched: list[bytes]


async def read_all(stubs: Stubs, attempts: Sequence[str]) -> Reads:
    """Reads the spans of attempts in every way that there is."""
    wanted = pb.SpanFilter(name_prefix="1.", min_duration={"seconds": 1})
    streams = [
        stubs.spans.StreamSpans(pb.StreamSpansRequest(parents=attempts, **settings))
        for settings in ({}, {"filter": wanted})
    ]
    streamed, filtered = [
        [chunk.SerializeToString(deterministic=True) async for message in stream for chunk in message.chunks]
        for stream in streams
    ]
    page = pb.ListSpansRequest(parents=attempts, page_size=3)
    listed: list[bytes] = []
    while True:
        answer = await stubs.spans.ListSpans(page)
        listed += [each.SerializeToString(deterministic=True) for each in answer.spans]
        if not answer.next_page_token:
            break
        page.page_token = answer.next_page_token
    watched = [
        chunk.SerializeToString(deterministic=True)
        for attempt in attempts
        async for message in stubs.spans.WatchSpans(pb.WatchSpansRequest(parent=attempt))
        for chunk in message.chunks
    ]
    return Reads(streamed=streamed, filtered=filtered, listed=listed, watched=watched)
