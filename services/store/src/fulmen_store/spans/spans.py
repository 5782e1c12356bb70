"""Spans: taken in as bytes, committed in groups, handed out as they came.

Invariant: a chunk is stored once however often it is sent; spans of an ended attempt are kept and change no state.
What is inside a payload is never looked at here.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol
from uuid import UUID

from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.spans.blob_refs import BlobRef, span_folder

__all__ = [
    "BYTES_PER_CHUNK",
    "SPANS_PER_CHUNK",
    "BlobWriter",
    "Chunk",
    "LooseSpans",
    "NewChunk",
    "SpanTable",
    "Spans",
    "chunk_problem",
]

MAX_SPANS: Final = 4096
MAX_PAYLOAD_BYTES: Final = 2 * 1024 * 1024
CODECS: Final = frozenset({1, 2})
CODEC_ZSTD: Final = 2
SPANS_PER_CHUNK: Final = 512
# Uncompressed, so that even incompressible spans stay below the limit of a payload.
BYTES_PER_CHUNK: Final = MAX_PAYLOAD_BYTES // 2
# Compressed faster than a thread is handed the work.
PACKED_AT_ONCE_BYTES: Final = 32 * 1024
MAX_TIME_NS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A batch of spans of one attempt.

    Attributes:
        codec: the number of a `fulmen.store.v1.SpanCodec`.
        start_ns: Unix time of the earliest start, nanoseconds.
        end_ns: Unix time of the latest end, nanoseconds.
        payload: a compressed `SpanBatch`, opaque here; empty while it lies in a blob.
        blob: where the payload lies if it is not in the row.
    """

    rollout_id: UUID
    attempt: int
    chunk_id: UUID
    span_count: int
    codec: int
    start_ns: int
    end_ns: int
    payload: bytes
    blob: BlobRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """A chunk to store; refused unless its rollout exists, in the writer's project if the writer is bound to one."""

    chunk: Chunk
    project_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseSpans:
    """Spans of one attempt that came by themselves, to be packed with whatever else of the attempt comes now.

    Attributes:
        raw: a serialised `SpanBatch`, not compressed; two of them joined are one.
    """

    rollout_id: UUID
    attempt: int
    span_count: int
    start_ns: int
    end_ns: int
    raw: bytes = field(repr=False)
    project_id: int | None


class SpanTable(Protocol):
    """Where chunks live."""

    async def append(self, chunks: Sequence[NewChunk]) -> set[int]:
        """Stores chunks in one commit; returns the positions of those whose rollout is not there."""
        ...


class BlobWriter(Protocol):
    """Where large payloads go."""

    async def put(self, content: bytes, *, folder: str) -> BlobRef:
        """Stores content durably under its digest; repeats change nothing."""
        ...


class Spans:
    """Appends chunks, and packs spans that are not in one yet."""

    def __init__(
        self,
        *,
        table: SpanTable,
        compress: Callable[[bytes], bytes],
        blobs: BlobWriter | None = None,
        blob_min_bytes: int = 0,
        observe_batch: Callable[[str, int], None] = lambda _name, _rows: None,
        stored: Callable[[Sequence[Chunk], int], None] | None = None,
    ) -> None:
        """Wires the use case.

        Args:
            table: where chunks are stored.
            compress: makes a zstd frame.
            blobs: where payloads of at least `blob_min_bytes` go; None: they stay in their rows.
            blob_min_bytes: see `blobs`.
            observe_batch: told the name and the number of rows of every commit.
            stored: told of chunks that are kept, and since when they were being stored, nanoseconds since 1970.
        """
        self._table = table
        self._stored = stored
        self._compress = compress
        self._blobs = blobs
        self._blob_min_bytes = blob_min_bytes
        self.committer: GroupCommitter[NewChunk, bool] = GroupCommitter(
            "append_spans", self._execute, observe_batch=observe_batch
        )
        self.packer: GroupCommitter[LooseSpans, bool] = GroupCommitter(
            "pack_spans", self._pack_and_append, observe_batch=observe_batch
        )

    async def append(self, chunks: Sequence[NewChunk]) -> list[bool]:
        """Stores chunks; returns, after the commit, which are kept (repeats included).

        Raises:
            DatabaseUnavailable: if the outcome is not known; the same chunks may be sent again.
            BlobStorageUnavailable: if a large payload could not be put away; likewise.
        """
        start_ns = time.time_ns()
        if self._blobs is not None:
            chunks = await asyncio.gather(*(self._offloaded(new, self._blobs) for new in chunks))
        kept = await self.committer.submit(chunks, size_bytes=sum(len(new.chunk.payload) + 64 for new in chunks))
        if self._stored is not None:
            self._stored([new.chunk for new, is_kept in zip(chunks, kept, strict=True) if is_kept], start_ns)
        return kept

    async def append_loose(self, spans: Sequence[LooseSpans]) -> list[bool]:
        """Packs and stores spans; those of one attempt that arrive together share chunks.

        Spans that come alone make the same chunk when they come again. Otherwise a repeat is stored, and its spans are
        dropped when they are read.

        Raises:
            DatabaseUnavailable: if the outcome is not known; the same spans may be sent again.
            BlobStorageUnavailable: if a large payload could not be put away; likewise.
        """
        return await self.packer.submit(spans, size_bytes=sum(len(part.raw) + 64 for part in spans))

    async def _execute(self, chunks: Sequence[NewChunk]) -> list[bool]:
        unknown = await self._table.append(chunks)
        return [position not in unknown for position in range(len(chunks))]

    async def _pack_and_append(self, spans: Sequence[LooseSpans]) -> list[bool]:
        groups = list(_groups(spans))
        if sum(len(part.raw) for part in spans) <= PACKED_AT_ONCE_BYTES:
            chunks = [self._packed([spans[position] for position in group]) for group in groups]
        else:
            chunks = await asyncio.to_thread(
                lambda: [self._packed([spans[position] for position in group]) for group in groups]
            )
        answers = [False] * len(spans)
        for group, is_kept in zip(groups, await self.append(chunks), strict=True):
            for position in group:
                answers[position] = is_kept
        return answers

    def _packed(self, spans: Sequence[LooseSpans]) -> NewChunk:
        first = spans[0]
        raw = first.raw if len(spans) == 1 else b"".join(part.raw for part in spans)
        start_ns = min(part.start_ns for part in spans)
        # An exporter repeats an export whose answer was lost: the same spans make the same id.
        name = b"%b/%d" % (first.rollout_id.bytes, first.attempt)
        digest = int.from_bytes(hashlib.sha256(name + raw).digest()[:10])
        chunk = Chunk(
            rollout_id=first.rollout_id,
            attempt=first.attempt,
            chunk_id=UUID(int=((start_ns // 1_000_000) & (2**48 - 1)) << 80 | digest),
            span_count=sum(part.span_count for part in spans),
            codec=CODEC_ZSTD,
            start_ns=min(start_ns, MAX_TIME_NS),
            end_ns=min(max(part.end_ns for part in spans), MAX_TIME_NS),
            payload=self._compress(raw),
        )
        return NewChunk(chunk=chunk, project_id=first.project_id)

    async def _offloaded(self, new: NewChunk, blobs: BlobWriter) -> NewChunk:
        chunk = new.chunk
        if len(chunk.payload) < self._blob_min_bytes:
            return new
        blob = await blobs.put(chunk.payload, folder=span_folder(chunk.rollout_id))
        return NewChunk(chunk=replace(chunk, payload=b"", blob=blob), project_id=new.project_id)


def _groups(spans: Sequence[LooseSpans]) -> Iterator[list[int]]:
    """Groups the positions of spans that go into one chunk."""
    waiting: dict[tuple[UUID, int, int | None], list[int]] = {}
    for position, part in enumerate(spans):
        waiting.setdefault((part.rollout_id, part.attempt, part.project_id), []).append(position)
    for positions in waiting.values():
        group: list[int] = []
        count = size_bytes = 0
        for position in positions:
            part = spans[position]
            count, size_bytes = count + part.span_count, size_bytes + len(part.raw)
            if group and (count > SPANS_PER_CHUNK or size_bytes > BYTES_PER_CHUNK):
                yield group
                group, count, size_bytes = [], part.span_count, len(part.raw)
            group.append(position)
        yield group


def chunk_problem(*, span_count: int, codec: int, payload_size: int) -> str:
    """Returns what is wrong with a chunk, for a person; empty if nothing is."""
    if not 1 <= span_count <= MAX_SPANS:
        return f"span_count is {span_count}, allowed are 1 to {MAX_SPANS}"
    if codec not in CODECS:
        return f"codec {codec} is not known"
    if not 0 < payload_size <= MAX_PAYLOAD_BYTES:
        return f"payload has {payload_size} bytes, allowed are 1 to {MAX_PAYLOAD_BYTES}"
    return ""
