"""Span chunks: taken in as bytes, committed in groups, handed out as they came.

Invariant: a chunk is stored once however often it is sent; spans of an ended attempt are kept and change no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from fulmen_store.domain.group_commit import GroupCommitter

__all__ = ["Chunk", "NewChunk", "SpanTable", "Spans", "chunk_problem"]

MAX_SPANS: Final = 4096
MAX_PAYLOAD_BYTES: Final = 2 * 1024 * 1024
CODECS: Final = frozenset({1, 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A batch of spans of one attempt.

    Attributes:
        codec: the number of a `fulmen.store.v1.SpanCodec`.
        start_ns: Unix time of the earliest start, nanoseconds.
        end_ns: Unix time of the latest end, nanoseconds.
        payload: a compressed `SpanBatch`, opaque here.
    """

    rollout_id: UUID
    attempt: int
    chunk_id: UUID
    span_count: int
    codec: int
    start_ns: int
    end_ns: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """A chunk to store; refused unless its rollout exists, in the writer's project if the writer is bound to one."""

    chunk: Chunk
    project_id: int | None


class SpanTable(Protocol):
    """Where chunks live."""

    async def append(self, chunks: Sequence[NewChunk]) -> set[int]:
        """Stores chunks in one commit; returns the positions of those whose rollout is not there."""
        ...


class Spans:
    """Appends chunks."""

    def __init__(
        self, *, table: SpanTable, observe_batch: Callable[[str, int], None] = lambda _name, _rows: None
    ) -> None:
        """Wires the use case."""
        self._table = table
        self.committer: GroupCommitter[NewChunk, bool] = GroupCommitter(
            "append_spans", self._execute, observe_batch=observe_batch
        )

    async def append(self, chunks: Sequence[NewChunk]) -> list[bool]:
        """Stores chunks; returns, after the commit, which are kept (repeats included).

        Raises:
            DatabaseUnavailable: if the outcome is not known; the same chunks may be sent again.
        """
        return await self.committer.submit(chunks, size_bytes=sum(len(new.chunk.payload) + 64 for new in chunks))

    async def _execute(self, chunks: Sequence[NewChunk]) -> list[bool]:
        unknown = await self._table.append(chunks)
        return [position not in unknown for position in range(len(chunks))]


def chunk_problem(*, span_count: int, codec: int, payload_size: int) -> str:
    """Returns what is wrong with a chunk, for a person; empty if nothing is."""
    if not 1 <= span_count <= MAX_SPANS:
        return f"span_count is {span_count}, allowed are 1 to {MAX_SPANS}"
    if codec not in CODECS:
        return f"codec {codec} is not known"
    if not 0 < payload_size <= MAX_PAYLOAD_BYTES:
        return f"payload has {payload_size} bytes, allowed are 1 to {MAX_PAYLOAD_BYTES}"
    return ""
