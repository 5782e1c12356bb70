"""Span chunks in PostgreSQL, with large payloads in blobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

import asyncpg

from fulmen.errors import BlobMissing
from fulmen_store.database.database import Database, columns
from fulmen_store.database.days import require_partitions
from fulmen_store.projects.names import ProjectNames
from fulmen_store.spans.blob_refs import BlobRef, span_folder
from fulmen_store.spans.blobs import Blobs
from fulmen_store.spans.chunks import Chunk, NewChunk

__all__ = ["ATTEMPT_OVER", "UNKNOWN_ROLLOUT", "ChunkHead", "SpanParent", "SpanTable"]

# Problems of chunks that are not stored.
UNKNOWN_ROLLOUT: Final = "the rollout does not exist"
ATTEMPT_OVER: Final = "the attempt has ended, and the grace for its key's spans is over"

# Maximum size of the payloads that one reader holds at once.
READ_BYTES: Final = 4 * 1024 * 1024
ROLLOUTS_PER_PAGE: Final = 64
_NO_ROLLOUT: Final = UUID(int=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """A chunk without its payload."""

    rollout_id: UUID
    attempt: int
    chunk_id: UUID
    start_ns: int
    end_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanParent:
    """An attempt whose spans are read, or a whole rollout if `number` is 0."""

    project: str
    rollout_id: UUID
    number: int = 0


class SpanTable:
    """Reads and writes chunks of spans."""

    def __init__(
        self, database: Database, projects: ProjectNames, *, blobs: Blobs | None = None, key_grace_s: float = 60.0
    ) -> None:
        """Creates the table.

        Args:
            database: The database.
            projects: Names of projects.
            blobs: Storage of large payloads; by default none.
            key_grace_s: Time after an attempt's end in which its key may still add spans, seconds; 60 by default.
        """
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

    async def heads(self, parents: Sequence[SpanParent]) -> list[list[ChunkHead]]:
        """Returns the chunks of each parent, ordered by chunk id."""
        found: list[list[ChunkHead]] = [[] for _ in parents]
        numbers = await self._projects.find_all(parent.project for parent in parents)
        keys = [(parent.rollout_id, parent.number, numbers[parent.project]) for parent in parents]
        ids = [parent.rollout_id for parent in parents]
        for row in await self._database.fetch_of_days("chunk_heads", ids, *columns(keys, 3)):
            fields = dict(row)
            found[fields.pop("n") - 1].append(ChunkHead(**fields))
        return found

    async def watched(self, parent: SpanParent) -> tuple[int, bool]:
        """Returns the number of a parent's chunks, and whether it has ended or was removed, as of one moment."""
        numbers = await self._projects.find_all([parent.project])
        (row,) = await self._database.fetch_of_days(
            "watched_chunks", [parent.rollout_id], parent.rollout_id, parent.number, numbers[parent.project]
        )
        return row["chunk_count"], row["is_over"]

    async def read(self, heads: Sequence[ChunkHead]) -> AsyncIterator[Chunk]:
        """Yields chunks with their payloads, in the order given, a few MiB at a time.

        Raises:
            BlobMissing: If a stored payload is missing.
            BlobStorageUnavailable: If it cannot be read now.
        """
        for part in _by_size(heads):
            keys = [(head.rollout_id, head.attempt, head.chunk_id) for head in part]
            ids = [head.rollout_id for head in part]
            rows = await self._database.fetch_of_days("read_chunks", ids, *columns(keys, 3))
            for chunk in await asyncio.gather(*(self._with_payload(_chunk(row)) for row in rows)):
                yield chunk

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
            raise BlobMissing("A payload lies in a blob storage, but this store has none.", blob=chunk.blob.key)
        return replace(chunk, payload=await self._blobs.get(chunk.blob), blob=None)


def _by_size(heads: Sequence[ChunkHead]) -> list[list[ChunkHead]]:
    parts: list[list[ChunkHead]] = []
    size_bytes = READ_BYTES
    for head in heads:
        if size_bytes + head.size_bytes > READ_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append(head)
        size_bytes += head.size_bytes
    return parts


def _chunk(row: asyncpg.Record) -> Chunk:
    fields = dict(row)
    digest, size_bytes = fields.pop("blob"), fields.pop("blob_size")
    if digest is None:
        return Chunk(**fields)
    return Chunk(**fields, blob=BlobRef(folder=span_folder(fields["rollout_id"]), digest=digest, size_bytes=size_bytes))
