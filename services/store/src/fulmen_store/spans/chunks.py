"""Chunks of spans: the unit in which spans are written, stored and read. Payloads are opaque here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import zstandard

from fulmen_store.spans.blob_refs import BlobRef

__all__ = [
    "BYTES_PER_CHUNK",
    "MAX_PAYLOAD_BYTES",
    "SPANS_PER_CHUNK",
    "Chunk",
    "LooseSpans",
    "NewChunk",
    "chunk_problem",
    "compress",
]

MAX_SPANS: Final = 4096


MAX_PAYLOAD_BYTES: Final = 2 * 1024 * 1024


CODECS: Final = frozenset({1, 2})


CODEC_ZSTD: Final = 2


SPANS_PER_CHUNK: Final = 512


# Uncompressed size, so that even incompressible spans stay below the limit of a payload.
BYTES_PER_CHUNK: Final = MAX_PAYLOAD_BYTES // 2


MAX_TIME_NS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A batch of spans of one attempt.

    Attributes:
        codec: Number of a `fulmen.store.v1.SpanCodec`.
        start_ns: Unix time of the earliest start, nanoseconds.
        end_ns: Unix time of the latest end, nanoseconds.
        payload: Compressed `SpanBatch`, opaque here; empty while it is in a blob.
        blob: Reference to the payload if it is not in the row.
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
    """A chunk to store; refused unless its rollout exists in `project`, `projects/{project}`.

    Attributes:
        by_agent: Whether an attempt key sent it; then it is refused when its attempt has ended for longer than the grace.
    """

    chunk: Chunk
    project: str
    by_agent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseSpans:
    """Spans of one attempt that are not in a chunk yet; packed with others of the attempt that arrive together.

    Attributes:
        project: `projects/{project}`.
        raw: Serialised, uncompressed `SpanBatch`; two of them can be concatenated.
        by_agent: As in `NewChunk`.
    """

    rollout_id: UUID
    attempt: int
    span_count: int
    start_ns: int
    end_ns: int
    raw: bytes = field(repr=False)
    project: str
    by_agent: bool = False


def _groups(spans: Sequence[LooseSpans]) -> Iterator[list[int]]:
    """Yields the positions of the spans of each chunk."""
    waiting: dict[tuple[UUID, int, str, bool], list[int]] = {}
    for position, part in enumerate(spans):
        waiting.setdefault((part.rollout_id, part.attempt, part.project, part.by_agent), []).append(position)
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
    """Returns a description of the problem with a chunk; empty if it is valid."""
    if not 1 <= span_count <= MAX_SPANS:
        return f"span_count is {span_count}, allowed are 1 to {MAX_SPANS}"
    if codec not in CODECS:
        return f"codec {codec} is not known"
    if not 0 < payload_size <= MAX_PAYLOAD_BYTES:
        return f"payload has {payload_size} bytes, allowed are 1 to {MAX_PAYLOAD_BYTES}"
    return ""


# Level 1 takes half the time of level 3, and chunks of spans are hardly larger.
ZSTD_LEVEL: Final = 1


def compress(raw: bytes) -> bytes:
    """Compresses to a zstd frame that includes the content size."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
