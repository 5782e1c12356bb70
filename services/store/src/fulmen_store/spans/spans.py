"""Spans: accepted as bytes, committed in groups, returned unchanged.

Invariant: a chunk is stored once, however often it is sent; spans of an ended attempt change no state, and are kept
unless its own key sent them after the grace.
Payloads are opaque here.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from fulmen_store.database.group_commit import GroupCommitter
from fulmen_store.metrics import StoreMetrics
from fulmen_store.replicas.wakeups import Wakeups
from fulmen_store.spans.blob_refs import span_folder
from fulmen_store.spans.blobs import Blobs
from fulmen_store.spans.chunks import CODEC_ZSTD, MAX_TIME_NS, Chunk, LooseSpans, NewChunk, _groups, compress
from fulmen_store.spans.following import spans_key
from fulmen_store.spans.table import SpanTable
from fulmen_store.traces import RolloutTraces

__all__ = [
    "Spans",
]

# Batches up to this size are compressed faster than they can be passed to a thread.
INLINE_PACK_BYTES: Final = 32 * 1024


class Spans:
    """Stores chunks, and packs spans that are not in a chunk yet."""

    def __init__(
        self,
        *,
        table: SpanTable,
        blobs: Blobs | None = None,
        blob_min_bytes: int = 0,
        metrics: StoreMetrics | None = None,
        traces: RolloutTraces | None = None,
        wakeups: Wakeups | None = None,
    ) -> None:
        """Creates the use case.

        Args:
            table: Table of chunks.
            blobs: Storage for payloads of at least `blob_min_bytes`; by default all payloads are stored in rows.
            blob_min_bytes: Minimum size of a payload stored in `blobs`, bytes; 0 by default.
            metrics: Instruments; by default none.
            traces: The operator's traces; by default none.
            wakeups: Wakes the watchers of a rollout's spans; none by default.
        """
        self._wakeups = wakeups
        self._table = table
        self._traces = traces
        self._blobs = blobs
        self._blob_min_bytes = blob_min_bytes
        self.committer: GroupCommitter[NewChunk, str] = GroupCommitter("append_spans", self._execute, metrics=metrics)
        self.packer: GroupCommitter[LooseSpans, str] = GroupCommitter(
            "pack_spans", self._pack_and_append, metrics=metrics
        )

    async def append(self, chunks: Sequence[NewChunk]) -> list[str]:
        """Stores chunks; returns, after the commit, the problem of each; empty if it was accepted (repeats included).

        Raises:
            DatabaseUnavailable: If the outcome is unknown; the same chunks may be sent again.
            BlobStorageUnavailable: If a large payload could not be stored; the same call may be repeated.
        """
        start_ns = time.time_ns()
        if self._blobs is not None:
            chunks = await asyncio.gather(*(self._offloaded(new, self._blobs) for new in chunks))
        problems = await self.committer.submit(chunks, size_bytes=sum(len(new.chunk.payload) + 64 for new in chunks))
        if self._traces is not None:
            kept = [new for new, problem in zip(chunks, problems, strict=True) if not problem]
            self._traces.stored(kept, start_ns)
        return problems

    async def append_loose(self, spans: Sequence[LooseSpans]) -> list[str]:
        """Packs and stores spans, and returns the problem of each as `append` does. Spans of one attempt that arrive together share chunks.

        Repeated spans form the same chunk if they arrive alone. Otherwise the repeat is stored, and its spans are
        dropped on reading.

        Raises:
            DatabaseUnavailable: If the outcome is unknown; the same spans may be sent again.
            BlobStorageUnavailable: If a large payload could not be stored; the same call may be repeated.
        """
        return await self.packer.submit(spans, size_bytes=sum(len(part.raw) + 64 for part in spans))

    async def _execute(self, chunks: Sequence[NewChunk]) -> list[str]:
        refused = await self._table.append(chunks)
        if self._wakeups is not None:
            self._wakeups.wake({spans_key(new.chunk.rollout_id) for new in chunks})
        return [refused.get(position, "") for position in range(len(chunks))]

    async def _pack_and_append(self, spans: Sequence[LooseSpans]) -> list[str]:
        groups = list(_groups(spans))
        if sum(len(part.raw) for part in spans) <= INLINE_PACK_BYTES:
            chunks = [self._packed([spans[position] for position in group]) for group in groups]
        else:
            chunks = await asyncio.to_thread(
                lambda: [self._packed([spans[position] for position in group]) for group in groups]
            )
        answers = [""] * len(spans)
        for group, problem in zip(groups, await self.append(chunks), strict=True):
            for position in group:
                answers[position] = problem
        return answers

    def _packed(self, spans: Sequence[LooseSpans]) -> NewChunk:
        first = spans[0]
        raw = first.raw if len(spans) == 1 else b"".join(part.raw for part in spans)
        start_ns = min(part.start_ns for part in spans)
        # An exporter repeats an export whose response was lost; the same spans result in the same id.
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
            payload=compress(raw),
        )
        return NewChunk(chunk=chunk, project=first.project, by_agent=first.by_agent)

    async def _offloaded(self, new: NewChunk, blobs: Blobs) -> NewChunk:
        chunk = new.chunk
        if len(chunk.payload) < self._blob_min_bytes:
            return new
        blob = await blobs.put(chunk.payload, folder=span_folder(chunk.rollout_id))
        return replace(new, chunk=replace(chunk, payload=b"", blob=blob))
