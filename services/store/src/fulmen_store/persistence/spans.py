"""Span chunks in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from fulmen_store.domain.spans import Chunk, NewChunk
from fulmen_store.persistence.database import Database, columns

__all__ = ["PgSpans"]


class PgSpans:
    """Implements `SpanTable`, and the reads of the transport."""

    def __init__(self, database: Database) -> None:
        """Takes the database."""
        self._database = database

    async def append(self, chunks: Sequence[NewChunk]) -> set[int]:
        """Stores chunks in one commit; returns the positions of those whose rollout is not there."""
        rows = [
            (
                new.chunk.rollout_id, new.chunk.attempt, new.chunk.chunk_id, new.chunk.span_count, new.chunk.codec,
                new.chunk.start_ns, new.chunk.end_ns, new.chunk.payload, new.project_id,
            )
            for new in chunks
        ]  # fmt: skip
        return {row["n"] - 1 for row in await self._database.fetch("append_chunks", *columns(rows, 9))}

    async def read(self, parents: Sequence[tuple[UUID, int]], *, project_id: int | None) -> list[Chunk]:
        """Returns the chunks of attempts, or of whole rollouts where the number is 0, in order of chunk id."""
        rows = await self._database.fetch("read_chunks", *columns(parents, 2), project_id)
        return [Chunk(**dict(row)) for row in rows]
