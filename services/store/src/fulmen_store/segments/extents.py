"""Extents: the places of a rollout's chunks in a segment.

A segment is the payloads of its chunks, one after the other. What is said of each chunk is in PostgreSQL, in 47 bytes.
"""

from __future__ import annotations

import datetime
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final
from uuid import UUID

__all__ = ["Entry", "Extent", "SegmentWriter", "pack", "segment_key", "unpack"]

# Attempt, chunk id, spans, codec, start and end in nanoseconds, bytes, and CRC-32 of the payload.
_HEAD: Final = struct.Struct(">I16sHBqqII")
_FOLDER: Final = "segments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A chunk in a segment.

    Attributes:
        segment_id: The segment.
        day: Day of the rollout, UTC; a part of the object's name.
        start_byte: Where its payload begins.
        checksum: CRC-32 of the payload.
    """

    rollout_id: UUID
    attempt: int
    chunk_id: UUID
    span_count: int
    codec: int
    start_ns: int
    end_ns: int
    size_bytes: int
    checksum: int
    segment_id: int = 0
    day: datetime.date = datetime.date.min
    start_byte: int = 0

    def holds(self, payload: bytes) -> bool:
        """Returns whether this is the payload that was written."""
        return len(payload) == self.size_bytes and zlib.crc32(payload) == self.checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The chunks of a rollout that are together in a segment, as they are stored."""

    rollout_id: UUID
    start_byte: int
    heads: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the payloads."""
        return sum(head[6] for head in _HEAD.iter_unpack(self.heads))


def segment_key(day: datetime.date, segment_id: int) -> str:
    """Returns the name of a segment in the blob storage."""
    return f"{_FOLDER}/{day:%Y%m%d}/{segment_id:016x}"


def pack(entries: Sequence[Entry], start_byte: int) -> Extent:
    """Packs the chunks of a rollout, whose payloads follow each other."""
    heads = b"".join(
        _HEAD.pack(
            each.attempt, each.chunk_id.bytes, each.span_count, each.codec, each.start_ns, each.end_ns, each.size_bytes,
            each.checksum,
        )
        for each in entries
    )  # fmt: skip
    return Extent(rollout_id=entries[0].rollout_id, start_byte=start_byte, heads=heads)


def unpack(extent: Extent, *, segment_id: int, day: datetime.date) -> Iterator[Entry]:
    """Yields the chunks of an extent."""
    start_byte = extent.start_byte
    for attempt, chunk_id, span_count, codec, start_ns, end_ns, size_bytes, checksum in _HEAD.iter_unpack(extent.heads):
        yield Entry(
            rollout_id=extent.rollout_id, attempt=attempt, chunk_id=UUID(bytes=chunk_id), span_count=span_count,
            codec=codec, start_ns=start_ns, end_ns=end_ns, size_bytes=size_bytes, checksum=checksum,
            segment_id=segment_id, day=day, start_byte=start_byte,
        )  # fmt: skip
        start_byte += size_bytes


class SegmentWriter:
    """Collects the chunks of a segment, rollout by rollout."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.size_bytes = 0
        self._payloads: list[bytes] = []

    def add(self, entry: Entry, payload: bytes) -> None:
        """Adds a chunk after those that were added before."""
        self.entries.append(replace(entry, start_byte=self.size_bytes))
        self._payloads.append(payload)
        self.size_bytes += len(payload)

    def finished(self) -> tuple[bytes, Sequence[Extent]]:
        """Returns the content of the segment, and the extents of its rollouts."""
        content = b"".join(self._payloads)
        self._payloads.clear()
        groups = groupby(self.entries, key=lambda entry: entry.rollout_id)
        extents = [pack(entries, entries[0].start_byte) for entries in (list(group) for _, group in groups)]
        return content, extents
