"""Reads chunks out of segments, by ranges of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from fulmen.errors import BlobMissing
from fulmen_store.segments.extents import Entry, segment_key
from fulmen_store.spans.blobs import Blobs

__all__ = ["SegmentReader"]

# Parts of one object that are read with one request: the bytes between them cost less than another request.
RANGES_PER_READ: Final = 4096


class SegmentReader:
    """Reads the payloads of chunks."""

    def __init__(self, blobs: Blobs | None) -> None:
        """Creates the reader; without blob storage `blobs` is None."""
        self._blobs = blobs

    async def read(self, entries: Sequence[Entry]) -> Mapping[Entry, bytes]:
        """Returns the payload of each chunk that is whole; those that are damaged or missing are left out.

        Raises:
            BlobMissing: If there is no blob storage.
            BlobStorageUnavailable: If it cannot be read now.
        """
        if not entries:
            return {}
        if self._blobs is None:
            raise BlobMissing(
                "Spans are in a blob storage, but none is configured for this store.", blob=_key(entries[0])
            )
        by_key: dict[str, list[Entry]] = {}
        for entry in sorted(entries, key=lambda each: each.start_byte):
            by_key.setdefault(_key(entry), []).append(entry)
        found: dict[Entry, bytes] = {}
        parts = [
            (key, of_key[start : start + RANGES_PER_READ])
            for key, of_key in by_key.items()
            for start in range(0, len(of_key), RANGES_PER_READ)
        ]
        for whole in await asyncio.gather(*(self._read(self._blobs, key, part) for key, part in parts)):
            found |= whole
        return found

    @staticmethod
    async def _read(blobs: Blobs, key: str, entries: Sequence[Entry]) -> dict[Entry, bytes]:
        try:
            payloads = await blobs.read_ranges(key, [(entry.start_byte, entry.size_bytes) for entry in entries])
        except BlobMissing:
            return {}
        return await asyncio.to_thread(
            lambda: {entry: payload for entry, payload in zip(entries, payloads, strict=True) if entry.holds(payload)}
        )


def _key(entry: Entry) -> str:
    return segment_key(entry.day, entry.segment_id)
