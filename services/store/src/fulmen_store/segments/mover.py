"""Background role: moves chunks of ended rollouts out of PostgreSQL, into segments in the blob storage.

Invariants: a segment is durable before one commit takes its chunks out of the table and notes where they lie. A replica that
dies before the commit leaves a claim, by which the object is found and removed. Several replicas may work at the same time: a
chunk is taken out of the table by one of them.
"""

from __future__ import annotations

import asyncio
import datetime
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import structlog

from fulmen.errors import BlobStorageUnavailable, DatabaseUnavailable
from fulmen_store.clock import Clock
from fulmen_store.metrics import StoreMetrics
from fulmen_store.segments.extents import Entry, Extent, SegmentWriter, segment_key
from fulmen_store.segments.reader import SegmentReader
from fulmen_store.segments.table import LostClaim, MovableChunk, MovableRollout, SegmentTable, WastefulSegments
from fulmen_store.spans.blobs import SEGMENT_LIMIT_S, Blobs
from fulmen_store.spans.chunks import Chunk

__all__ = ["SegmentMover"]

INTERVAL_S: Final = 600.0
# Pause between segments, in favor of other statements.
PAUSE_S: Final = 0.05
ROLLOUTS_PER_PAGE: Final = 2000
# Of one segment, so that its commit is short.
MAX_CHUNKS: Final = 16_384
# Rollouts of all projects that are known to be movable and wait for others of theirs.
MAX_WAITING: Final = 100_000
# Segments below half of the full size are merged when a project has so many of a day.
SMALL_COUNT: Final = 8
GROUPS_PER_PASS: Final = 1000
REMOVALS_PER_BATCH: Final = 500

_log = structlog.get_logger()

ReadChunks = Callable[[Sequence[MovableChunk]], AsyncIterator[Chunk]]
"""Reads chunks that are in the table, in the given order; missing ones are left out."""


@dataclass(slots=True)
class _Waiting:
    """Movable rollouts of a project."""

    ids: list[UUID] = field(default_factory=list)
    size_bytes: int = 0
    chunk_count: int = 0

    def add(self, rollout: MovableRollout) -> None:
        self.ids.append(rollout.rollout_id)
        self.size_bytes += rollout.size_bytes
        self.chunk_count += rollout.chunk_count


class SegmentMover:
    """Moves chunks into segments, rewrites wasteful segments, and removes unused ones."""

    def __init__(
        self,
        *,
        table: SegmentTable,
        blobs: Blobs,
        read_chunks: ReadChunks,
        segment_bytes: int,
        after_s: float,
        metrics: StoreMetrics,
        clock: Clock | None = None,
    ) -> None:
        """Creates the role.

        Args:
            table: Table of segments.
            blobs: Where segments go.
            read_chunks: Reads chunks that are in the table.
            segment_bytes: Size of a full segment; 0 moves nothing, and looks after the segments that there are.
            after_s: Time after its end until a rollout's spans are moved, seconds.
            metrics: Instruments.
            clock: Clock for the current day.
        """
        self._table = table
        self._blobs = blobs
        self._reader = SegmentReader(blobs)
        self._read_chunks = read_chunks
        self._segment_bytes = segment_bytes
        self._after_s = after_s
        self._clock = clock or Clock()
        self._damaged: set[int] = set()
        self._passed_at = time.monotonic()
        self._note_written = metrics.watch_segments(lambda: time.monotonic() - self._passed_at)

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            try:
                await self.run_once()
            except (DatabaseUnavailable, BlobStorageUnavailable) as error:
                _log.warning("segments_postponed", reason=error.reason)
            await asyncio.sleep(INTERVAL_S)

    async def run_once(self) -> None:
        """Makes one pass: a day that is not over gives full segments only, and keeps the rest in the table.

        Raises:
            DatabaseUnavailable: If the database is unavailable.
            BlobStorageUnavailable: If the blob storage is.
        """
        await self._sweep()
        if self._segment_bytes:
            today = self._clock.utc_today()
            for day in await self._table.days_with_spans(today + datetime.timedelta(days=1)):
                moved = await self._move_day(day, is_over=day < today)
                if day < today and not moved:
                    # Only what was empty for a whole pass: a dump that began before would find the spans nowhere.
                    await self._table.truncate_empty_day(day)
        await self._rewrite()
        self._passed_at = time.monotonic()

    async def _move_day(self, day: datetime.date, *, is_over: bool) -> bool:
        """Moves what can be moved of a day; returns whether anything was."""
        waiting: dict[int, _Waiting] = {}
        count, after, moved = ROLLOUTS_PER_PAGE, UUID(int=0), False

        async def flush(project_id: int, *, whole: bool = False) -> None:
            nonlocal moved
            count, left = await self._move(project_id, day, waiting.pop(project_id).ids, whole=whole)
            moved |= count > 0
            if left.ids:
                waiting[project_id] = left

        while count == ROLLOUTS_PER_PAGE:
            page = await self._table.movable_rollouts(day, after=after, after_s=self._after_s, limit=ROLLOUTS_PER_PAGE)
            for rollout in page:
                of_project = waiting.setdefault(rollout.project_id, _Waiting())
                of_project.add(rollout)
                if of_project.size_bytes >= self._segment_bytes or of_project.chunk_count >= MAX_CHUNKS:
                    await flush(rollout.project_id)
            if sum(len(each.ids) for each in waiting.values()) > MAX_WAITING:
                await flush(max(waiting, key=lambda project_id: waiting[project_id].size_bytes), whole=True)
            count, after = len(page), page[-1].rollout_id if page else after
        if is_over:
            for project_id in list(waiting):
                await flush(project_id, whole=True)
        return moved

    async def _move(
        self, project_id: int, day: datetime.date, ids: Sequence[UUID], *, whole: bool
    ) -> tuple[int, _Waiting]:
        """Writes segments of a project's rollouts; returns their number, and the rollouts that fill less than half of one.

        With `whole` those are written too.
        """
        written = 0
        while True:
            keys = self._fitting(await self._table.movable_chunks(ids, MAX_CHUNKS))
            size_bytes = sum(key.size_bytes for key in keys)
            if not whole and 2 * size_bytes < self._segment_bytes and len(keys) < MAX_CHUNKS:
                left = list(dict.fromkeys(key.rollout_id for key in keys))
                return written, _Waiting(ids=left, size_bytes=size_bytes, chunk_count=len(keys))
            if not keys:
                return written, _Waiting()
            async with self._claimed(project_id, day) as segment_id:
                if segment_id is None or not await self._write(segment_id, day, keys):
                    return written, _Waiting()
            written += 1
            await asyncio.sleep(PAUSE_S)

    def _fitting(self, keys: Sequence[MovableChunk]) -> Sequence[MovableChunk]:
        """Returns the first chunks that fit into a segment, at least one; of whole rollouts if they are smaller."""
        size_bytes = whole = 0
        for count, key in enumerate(keys):
            whole = count if key.rollout_id != keys[count - 1].rollout_id else whole
            size_bytes += key.size_bytes
            if size_bytes > self._segment_bytes and count:
                return keys[: whole or count]
        return keys

    async def _write(self, segment_id: int, day: datetime.date, keys: Sequence[MovableChunk]) -> bool:
        writer = SegmentWriter()
        async for chunk in self._read_chunks(keys):
            writer.add(_entry(chunk), chunk.payload)
        if not writer.entries:
            return False
        return await self._commit(
            segment_id,
            day,
            writer,
            lambda extents: self._table.commit_moved(segment_id, writer.entries, extents, writer.size_bytes),
        )

    async def _commit(
        self,
        segment_id: int,
        day: datetime.date,
        writer: SegmentWriter,
        commit: Callable[[Sequence[Extent]], Awaitable[int]],
    ) -> bool:
        """Writes the object, then what refers to it; returns whether it did."""
        key = segment_key(day, segment_id)
        content, extents = await asyncio.to_thread(writer.finished)
        await self._blobs.write(key, content, limit_s=SEGMENT_LIMIT_S)
        try:
            live_bytes = await commit(extents)
        except LostClaim:
            _log.info("segment_dropped", segment=key)
            await self._blobs.remove_keys([key])
            return False
        self._note_written(live_bytes)
        _log.info("segment_written", segment=key, size_bytes=len(content), chunks=len(writer.entries))
        return True

    @asynccontextmanager
    async def _claimed(self, project_id: int, day: datetime.date) -> AsyncIterator[int | None]:
        """Yields the id of a new segment, or None if another replica writes one of the project and day."""
        segment_id = await self._table.claim(project_id, day)
        try:
            yield segment_id
        finally:
            if segment_id is not None:
                # Does nothing if it was finished. If this fails, a later pass of any replica gives the claim up.
                with suppress(DatabaseUnavailable):
                    await self._table.release(segment_id)

    async def _rewrite(self) -> None:
        """Rewrites segments that are mostly dead, have had dead bytes for a long time, or are many and small."""
        for found in await self._table.wasteful(
            segment_bytes=max(1, self._segment_bytes), small_count=SMALL_COUNT, limit=GROUPS_PER_PASS
        ):
            sources: list[int] = []
            live_bytes, is_worth_it = 0, False
            for segment_id, size_bytes, is_dead in zip(found.ids, found.live_bytes, found.are_dead, strict=True):
                if segment_id in self._damaged or (sources and live_bytes + size_bytes > self._segment_bytes):
                    continue
                sources.append(segment_id)
                live_bytes += size_bytes
                is_worth_it = is_worth_it or is_dead or len(sources) > 1
            if is_worth_it:
                await self._merge(found, sources)
                await asyncio.sleep(PAUSE_S)

    async def _merge(self, found: WastefulSegments, sources: Sequence[int]) -> None:
        async with self._claimed(found.project_id, found.day) as segment_id:
            if segment_id is None:
                return
            entries = await self._table.entries_of_segments(sources)
            payloads = await self._reader.read(entries)
            damaged = {entry.segment_id for entry in entries if entry not in payloads}
            if damaged:
                # Kept unchanged, so that they can be repaired. Readers count what they cannot read.
                self._damaged |= damaged
                _log.error("segment_damaged", segments=[segment_key(found.day, each) for each in sorted(damaged)])
                return
            writer = SegmentWriter()
            for entry in entries:
                writer.add(entry, payloads[entry])
            pairs = sorted({(entry.rollout_id, entry.segment_id) for entry in entries})
            if pairs:
                await self._commit(
                    segment_id,
                    found.day,
                    writer,
                    lambda extents: self._table.commit_rewritten(segment_id, pairs, extents, writer.size_bytes),
                )

    async def _sweep(self) -> None:
        """Drops the claims of writers that have died, and removes unreferenced objects."""
        await self._table.release()
        while segments := await self._table.removable(REMOVALS_PER_BATCH):
            await self._blobs.remove_keys(segment_key(day, segment_id) for segment_id, day in segments.items())
            await self._table.forget(list(segments))


def _entry(chunk: Chunk) -> Entry:
    return Entry(
        rollout_id=chunk.rollout_id, attempt=chunk.attempt, chunk_id=chunk.chunk_id, span_count=chunk.span_count,
        codec=chunk.codec, start_ns=chunk.start_ns, end_ns=chunk.end_ns, size_bytes=len(chunk.payload),
        checksum=zlib.crc32(chunk.payload),
    )  # fmt: skip
