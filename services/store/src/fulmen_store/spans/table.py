"""Span chunks in PostgreSQL, or in segments of the blob storage, or with a large payload in a blob of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar
from uuid import UUID

import asyncpg
import structlog

from fulmen.errors import BlobMissing
from fulmen_store.database.database import Database, columns
from fulmen_store.database.days import day_of, require_partitions
from fulmen_store.metrics import StoreMetrics
from fulmen_store.projects.names import ProjectNames
from fulmen_store.segments.extents import Entry, Extent, segment_key, unpack
from fulmen_store.segments.reader import SegmentReader
from fulmen_store.segments.table import SegmentTable
from fulmen_store.spans.blob_refs import BlobRef, span_folder
from fulmen_store.spans.blobs import Blobs
from fulmen_store.spans.chunks import Chunk, NewChunk

__all__ = ["ATTEMPT_OVER", "UNKNOWN_ROLLOUT", "ChunkHead", "SpanParent", "SpanTable", "Watched"]

# Problems of chunks that are not stored.
UNKNOWN_ROLLOUT: Final = "the rollout does not exist"
ATTEMPT_OVER: Final = "the attempt has ended, and the grace period for its key's spans is over"

# Maximum size of the payloads that one reader holds at a time.
READ_BYTES: Final = 4 * 1024 * 1024
ROLLOUTS_PER_PAGE: Final = 64
_NO_ROLLOUT: Final = UUID(int=0)
S = TypeVar("S", bound="Sized")


Key = tuple[UUID, int, UUID]
"""Rollout, attempt and id of a chunk."""

_log = structlog.get_logger()


class Sized(Protocol):
    """A chunk whose payload can be read."""

    @property
    def rollout_id(self) -> UUID:
        """The rollout."""

    @property
    def attempt(self) -> int:
        """Number of the attempt."""

    @property
    def chunk_id(self) -> UUID:
        """Id of the chunk."""

    @property
    def size_bytes(self) -> int:
        """Size of the payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """A chunk without its payload.

    Attributes:
        entry: Its place in a segment; None if it is in the table.
    """

    rollout_id: UUID
    attempt: int
    chunk_id: UUID
    start_ns: int
    end_ns: int
    size_bytes: int
    entry: Entry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanParent:
    """An attempt whose spans are read, or a whole rollout if `number` is 0."""

    project: str
    rollout_id: UUID
    number: int = 0

    def digest(self) -> bytes:
        """Returns 4 bytes that identify it."""
        return hashlib.sha256(f"spans/{self.project}/{self.rollout_id}/{self.number}".encode()).digest()[:4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a look finds of a watched parent, as of one moment.

    Attributes:
        chunk_count: Number of its chunks.
        is_over: Whether it has ended or was removed.
        settled: The oldest transaction that may still write; all chunks of older ones are counted.
    """

    chunk_count: int
    is_over: bool
    settled: int


class SpanTable:
    """Reads and writes chunks of spans."""

    def __init__(
        self,
        database: Database,
        projects: ProjectNames,
        *,
        blobs: Blobs | None = None,
        key_grace_s: float = 60.0,
        metrics: StoreMetrics | None = None,
    ) -> None:
        """Creates the table.

        Args:
            database: The database.
            projects: Names of projects.
            blobs: Storage of segments and large payloads; by default none.
            key_grace_s: Time after an attempt's end in which its key may still add spans, seconds; 60 by default.
            metrics: Instruments; by default none.
        """
        self._metrics = metrics
        self._segments = SegmentTable(database)
        self._reader = SegmentReader(blobs)
        self._database = database
        self._key_grace_s = key_grace_s
        self._projects = projects
        self._blobs = blobs

    async def append(self, chunks: Sequence[NewChunk]) -> dict[int, str]:
        """Stores chunks in one commit; returns the problems of those that are refused, by position.

        Raises:
            DatabaseUnavailable: If the outcome is unknown, or a day's table is missing and cannot be created now.
        """
        numbers = await self._projects.find_all(new.project for new in chunks)
        rows = [
            (
                new.chunk.rollout_id, new.chunk.attempt, new.chunk.chunk_id, new.chunk.span_count, new.chunk.codec,
                new.chunk.start_ns, new.chunk.end_ns, new.chunk.payload, numbers[new.project],
                *((None, None) if new.chunk.blob is None else (new.chunk.blob.digest, new.chunk.blob.size_bytes)),
                new.by_agent,
            )
            for new in chunks
        ]  # fmt: skip
        values = (*columns(rows, 12), self._key_grace_s)
        try:
            refused = await self._database.fetch("append_chunks", *values)
        except asyncpg.CheckViolationError as error:
            if error.constraint_name is not None:
                raise
            # No partition: the background role has not made that day, or retention has dropped it.
            await self._create_partitions(chunks)
            refused = await self._database.fetch("append_chunks", *values)
        return {row["n"] - 1: ATTEMPT_OVER if row["known"] else UNKNOWN_ROLLOUT for row in refused}

    async def heads(self, parents: Sequence[SpanParent], *, since: int = 0) -> list[list[ChunkHead]]:
        """Returns the chunks of each parent, ordered by chunk id.

        Args:
            parents: The rollouts or attempts.
            since: Leaves out chunks that older transactions wrote, but for those in segments and very old ones.
        """
        found: list[list[ChunkHead]] = [[] for _ in parents]
        numbers = await self._projects.find_all(parent.project for parent in parents)
        keys = [(parent.rollout_id, parent.number, numbers[parent.project]) for parent in parents]
        ids = [parent.rollout_id for parent in parents]
        for row in await self._database.fetch_of_days("chunk_heads", ids, *columns(keys, 3), since):
            found[row["n"] - 1] += _heads(row, number=parents[row["n"] - 1].number)
        return [_ordered(heads) for heads in found]

    async def watched(self, parents: Sequence[SpanParent]) -> list[Watched]:
        """Looks at parents, in one statement."""
        numbers = await self._projects.find_all(parent.project for parent in parents)
        keys = [(parent.rollout_id, parent.number, numbers[parent.project]) for parent in parents]
        ids = [parent.rollout_id for parent in parents]
        rows = await self._database.fetch_of_days("watched_chunks", ids, *columns(keys, 3))
        return [Watched(chunk_count=row["chunk_count"], is_over=row["is_over"], settled=row["settled"]) for row in rows]

    async def read(self, heads: Sequence[ChunkHead]) -> AsyncIterator[Chunk]:
        """Yields chunks with their payloads, in the order given, a few MiB at a time.

        Chunks whose segment is damaged or missing are left out, counted and logged.

        Raises:
            BlobMissing: If a stored payload that has an object of its own is missing.
            BlobStorageUnavailable: If the blob storage cannot be read now.
        """
        for part in _by_size(heads):
            found = {_key(chunk): chunk for chunk in await self._rows([head for head in part if head.entry is None])}
            if len(found) < len(part):
                found |= await self._from_segments([head for head in part if _key(head) not in found])
            for head in part:
                if (chunk := found.get(_key(head))) is not None:
                    yield chunk

    async def read_rows(self, chunks: Sequence[Sized]) -> AsyncIterator[Chunk]:
        """Yields only the chunks that are in the table; otherwise as `read`."""
        for part in _by_size(chunks):
            for chunk in await self._rows(part):
                yield chunk

    async def _rows(self, chunks: Sequence[Sized]) -> Sequence[Chunk]:
        if not chunks:
            return []
        keys = [_key(chunk) for chunk in chunks]
        ids = [chunk.rollout_id for chunk in chunks]
        rows = await self._database.fetch_of_days("read_chunks", ids, *columns(keys, 3))
        return await asyncio.gather(*(self._with_payload(_chunk(row)) for row in rows))

    async def _from_segments(self, heads: Sequence[ChunkHead]) -> dict[Key, Chunk]:
        """Reads chunks that are in segments now; those that are in none were deleted."""
        entries = [head.entry for head in heads if head.entry is not None]
        payloads = dict(await self._reader.read(entries))
        lost = {_key(head): head.entry for head in heads if head.entry not in payloads}
        if lost:
            # Moved since its head was read, out of the table or into another segment.
            now = await self._segments.entries_of_rollouts(sorted({rollout_id for rollout_id, _, _ in lost}))
            entries = [entry for entry in now if _key(entry) in lost]
            payloads |= await self._reader.read([entry for entry in entries if entry != lost[_key(entry)]])
            for entry in entries:
                if entry not in payloads:
                    self._note_damage(entry)
        return {_key(entry): _chunk_of(entry, payload) for entry, payload in payloads.items()}

    def _note_damage(self, entry: Entry) -> None:
        if self._metrics is not None:
            self._metrics.chunk_unreadable()
        segment = segment_key(entry.day, entry.segment_id)
        _log.error(
            "segment_damaged",
            segment=segment,
            rollout=str(entry.rollout_id),
            attempt=entry.attempt,
            chunk_id=str(entry.chunk_id),
        )

    async def rollouts_of_run(self, project_id: int, run_id: int) -> AsyncIterator[list[UUID]]:
        """Yields the ids of a training run's rollouts, oldest first, page by page."""
        after = _NO_ROLLOUT
        while True:
            rows = await self._database.fetch("rollouts_of_run", project_id, run_id, after, ROLLOUTS_PER_PAGE)
            if not rows:
                return
            after = rows[-1]["id"]
            yield [row["id"] for row in rows]

    async def _create_partitions(self, chunks: Sequence[NewChunk]) -> None:
        ids = [new.chunk.rollout_id for new in chunks]
        require_partitions(await self._database.fetch("create_partitions_of_rollouts", ids))

    async def _with_payload(self, chunk: Chunk) -> Chunk:
        if chunk.blob is None:
            return chunk
        if self._blobs is None:
            raise BlobMissing(
                "A payload is in a blob storage, but none is configured for this store.", blob=chunk.blob.key
            )
        return replace(chunk, payload=await self._blobs.get(chunk.blob), blob=None)


def _by_size(heads: Sequence[S]) -> list[list[S]]:
    parts: list[list[S]] = []
    size_bytes = READ_BYTES
    for head in heads:
        if size_bytes + head.size_bytes > READ_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append(head)
        size_bytes += head.size_bytes
    return parts


def _key(chunk: ChunkHead | Chunk | Entry | Sized) -> Key:
    return chunk.rollout_id, chunk.attempt, chunk.chunk_id


def _ordered(heads: Sequence[ChunkHead]) -> list[ChunkHead]:
    """Orders heads by chunk id. A chunk that was sent again after it was moved is in the table and in a segment."""
    return sorted({_key(head): head for head in heads}.values(), key=lambda head: (head.chunk_id, head.attempt))


def _heads(row: asyncpg.Record, *, number: int) -> list[ChunkHead]:
    """Returns the chunk of the table that a row is, or those of an extent that are of an attempt, or of any if it is 0."""
    if row["heads"] is None:
        fields = ("rollout_id", "attempt", "chunk_id", "start_ns", "end_ns", "size_bytes")
        return [ChunkHead(**{field: row[field] for field in fields})]
    extent = Extent(rollout_id=row["rollout_id"], start_byte=row["start_byte"], heads=row["heads"])
    return [
        ChunkHead(
            rollout_id=entry.rollout_id, attempt=entry.attempt, chunk_id=entry.chunk_id, start_ns=entry.start_ns,
            end_ns=entry.end_ns, size_bytes=entry.size_bytes, entry=entry,
        )
        for entry in unpack(extent, segment_id=row["segment_id"], day=day_of(extent.rollout_id))
        if number in (0, entry.attempt)
    ]  # fmt: skip


def _chunk_of(entry: Entry, payload: bytes) -> Chunk:
    return Chunk(
        rollout_id=entry.rollout_id, attempt=entry.attempt, chunk_id=entry.chunk_id, span_count=entry.span_count,
        codec=entry.codec, start_ns=entry.start_ns, end_ns=entry.end_ns, payload=payload,
    )  # fmt: skip


def _chunk(row: asyncpg.Record) -> Chunk:
    fields = dict(row)
    digest, size_bytes = fields.pop("blob"), fields.pop("blob_size")
    if digest is None:
        return Chunk(**fields)
    return Chunk(**fields, blob=BlobRef(folder=span_folder(fields["rollout_id"]), digest=digest, size_bytes=size_bytes))
