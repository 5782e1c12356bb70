"""Segments of spans in PostgreSQL: the existing ones, and the places of chunks in them.

Locks are taken in one order: chunks, extents by rollout, segments by id.
"""

from __future__ import annotations

import datetime
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen_store.database.database import Database, Transaction, columns
from fulmen_store.database.days import DAY_MS, day_of, first_id
from fulmen_store.segments.extents import Entry, Extent, unpack

__all__ = ["LostClaim", "MovableChunk", "MovableRollout", "SegmentTable", "WastefulSegments", "remove_extents"]

_ID_BITS: Final = 63
_EPOCH: Final = datetime.date(1970, 1, 1)


class LostClaim(Exception):
    """What was written is not referred to: the claim was given up, or its chunks were taken away meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovableRollout:
    """An ended rollout that has chunks in the table."""

    rollout_id: UUID
    project_id: int
    chunk_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovableChunk:
    """A chunk in the table."""

    rollout_id: UUID
    attempt: int
    chunk_id: UUID
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WastefulSegments:
    """Segments of a project and day that should be rewritten: those with dead bytes first, then the smallest.

    Attributes:
        project_id: The project.
        day: Day of the rollouts.
        ids: The segments.
        live_bytes: Of each, what is still referred to.
        are_dead: Of each, whether half of it is dead, or something has been for a week.
    """

    project_id: int
    day: datetime.date
    ids: Sequence[int]
    live_bytes: Sequence[int]
    are_dead: Sequence[bool]


async def remove_extents(transaction: Transaction, rollout_ids: Sequence[UUID]) -> None:
    """Removes the places of rollouts' chunks; their segments are rewritten or removed later."""
    lost: Counter[int] = Counter()
    for row in await transaction.fetch("remove_extents", rollout_ids):
        lost[row["segment_id"]] += Extent(rollout_id=UUID(int=0), start_byte=0, heads=row["heads"]).size_bytes
    if lost:
        await transaction.fetch("shrink_segments", *columns(sorted(lost.items()), 2))


class SegmentTable:
    """Reads and writes segments and extents."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def days_with_spans(self, before: datetime.date) -> list[datetime.date]:
        """Returns the days before a date that have spans in the table, oldest first."""
        return [row["day"] for row in await self._database.fetch("days_with_spans", before)]

    async def movable_rollouts(
        self, day: datetime.date, *, after: UUID, after_s: float, limit: int
    ) -> list[MovableRollout]:
        """Returns rollouts of a day that ended at least `after_s` seconds ago, with ids above `after`, by id."""
        rows = await self._database.fetch_of_days("movable_rollouts", [_id_of(day)], after, after_s, limit)
        return [MovableRollout(**row) for row in rows]

    async def movable_chunks(self, rollout_ids: Sequence[UUID], limit: int) -> list[MovableChunk]:
        """Returns the first chunks of rollouts that are in the table, by rollout."""
        rows = await self._database.fetch_of_days("movable_chunks", rollout_ids, rollout_ids, limit)
        return [MovableChunk(**row) for row in rows]

    async def truncate_empty_day(self, day: datetime.date) -> bool:
        """Returns the disk space of a day's table to the system if it is empty and not being read; returns whether it
        did."""
        row = await self._database.fetch_row("truncate_empty_day", day)
        return row is not None and row["is_empty"]

    async def claim(self, project_id: int, day: datetime.date) -> int | None:
        """Returns the id of a new segment; None if one of the project and day is being written."""
        segment_id = 1 + secrets.randbelow(2**_ID_BITS - 1)
        row = await self._database.fetch_row("claim_segment", segment_id, project_id, day)
        return None if row is None else segment_id

    async def release(self, segment_id: int | None = None) -> None:
        """Drops a segment that was not finished, and the segments of writers that have died."""
        await self._database.fetch("release_claims", segment_id)

    async def commit_moved(
        self, segment_id: int, entries: Sequence[Entry], extents: Sequence[Extent], size: int
    ) -> int:
        """Removes chunks from the table and records their places, in one commit; returns the number of live bytes.

        Rollouts that were deleted meanwhile are left out.

        Raises:
            LostClaim: If nothing is left, the claim was given up, or a rollout has lost only some of its chunks.
        """
        keys = [(each.rollout_id, each.attempt, each.chunk_id) for each in entries]
        ids = [each.rollout_id for each in entries]
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch_of_days("move_chunks", ids, *columns(keys, 3))
            if not {tuple(row.values()) for row in rows} <= set(keys):
                raise LostClaim
            return await _finish(
                transaction, segment_id, extents, size, Counter(ids), Counter(r["rollout_id"] for r in rows)
            )

    async def commit_rewritten(
        self, segment_id: int, sources: Sequence[tuple[UUID, int]], extents: Sequence[Extent], size: int
    ) -> int:
        """Notes the new places of chunks in one commit; returns the number of live bytes.

        Args:
            segment_id: The new segment.
            sources: Rollout and old segment of each extent that was copied.
            extents: The new extents.
            size: Bytes of the new segment.

        Raises:
            LostClaim: As `commit_moved`.
        """
        async with self._database.transaction() as transaction:
            rows = await transaction.fetch("take_extents", *columns(sources, 2))
            expected, taken = Counter(rollout_id for rollout_id, _ in sources), Counter(r["rollout_id"] for r in rows)
            live = await _finish(transaction, segment_id, extents, size, expected, taken)
            await transaction.fetch("replace_segments", sorted({each for _, each in sources}))
            return live

    async def entries_of_rollouts(self, rollout_ids: Sequence[UUID]) -> list[Entry]:
        """Returns the chunks of rollouts that are in segments."""
        found: list[Entry] = []
        for row in await self._database.fetch("extents_of_rollouts", rollout_ids):
            found += _entries(row)
        return found

    async def entries_of_segments(self, segment_ids: Sequence[int]) -> list[Entry]:
        """Returns the chunks that are in segments, by rollout and segment."""
        found: list[Entry] = []
        for row in await self._database.fetch("extents_of_segments", segment_ids):
            found += _entries(row)
        return found

    async def wasteful(self, *, segment_bytes: int, small_count: int, limit: int) -> list[WastefulSegments]:
        """Returns segments that are half dead, have had dead bytes for a week, or are small beside `small_count` others."""
        rows = await self._database.fetch("wasteful_segments", segment_bytes, small_count, limit)
        return [WastefulSegments(**row) for row in rows]

    async def removable(self, limit: int) -> Mapping[int, datetime.date]:
        """Returns unreferenced segments, with their days."""
        return {row["id"]: row["day"] for row in await self._database.fetch("removable_segments", limit)}

    async def forget(self, segment_ids: Sequence[int]) -> None:
        """Removes segments whose objects were deleted."""
        await self._database.fetch("forget_segments", segment_ids)


async def _finish(
    transaction: Transaction,
    segment_id: int,
    extents: Sequence[Extent],
    size: int,
    expected: Mapping[UUID, int],
    taken: Mapping[UUID, int],
) -> int:
    kept = [extent for extent in extents if extent.rollout_id in taken]
    if not kept or any(taken[extent.rollout_id] != expected[extent.rollout_id] for extent in kept):
        raise LostClaim
    rows = [(extent.rollout_id, extent.start_byte, extent.heads) for extent in kept]
    await transaction.fetch("insert_extents", segment_id, *columns(rows, 3))
    live = sum(extent.size_bytes for extent in kept)
    if await transaction.fetch_row("finish_segment", segment_id, size, live) is None:
        raise LostClaim
    return live


def _entries(row: Mapping[str, object]) -> list[Entry]:
    extent = Extent(rollout_id=row["rollout_id"], start_byte=row["start_byte"], heads=row["heads"])  # type: ignore[arg-type]
    return list(unpack(extent, segment_id=row["segment_id"], day=day_of(extent.rollout_id)))  # type: ignore[arg-type]


def _id_of(day: datetime.date) -> UUID:
    """Returns the lowest id of a day's rollouts."""
    return first_id((day - _EPOCH).days * DAY_MS)
