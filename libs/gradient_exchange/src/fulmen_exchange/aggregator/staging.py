"""Where the chunks of a payload are put together."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from fulmen_exchange.aggregator.checksum import crc32, joined, without
from fulmen_exchange.aggregator.terms import CHUNK_BYTES

ALIGNMENT = 16
CHECKED_FROM = 8
"""Bytes at the beginning of a payload that its own checksum leaves out: it is among them."""
_HEADER_LENGTH = struct.Struct("<8xI")


@dataclass(slots=True)
class BufferPool:
    """Buffers of payloads that were summed, for those of the next: memory that is new costs more than what is done with it.

    Attributes:
        most: How many are kept.
    """

    most: int = 0
    _buffers: list[bytearray] = field(default_factory=list, repr=False)

    def take(self, size: int) -> bytearray:
        """Returns a buffer with room for so many bytes, and not for many more."""
        fitting = [buffer for buffer in self._buffers if size <= len(buffer) <= 2 * size]
        if not fitting:
            return bytearray(size)
        best = min(fitting, key=len)
        # By identity: to compare what is in them would take long.
        self._buffers = [buffer for buffer in self._buffers if buffer is not best]
        return best

    def give(self, buffer: bytearray) -> None:
        """Takes a buffer that nobody reads any more."""
        if len(buffer) >= CHUNK_BYTES:
            self._buffers.append(buffer)
            del self._buffers[: max(0, len(self._buffers) - self.most)]

    @property
    def size_bytes(self) -> int:
        """CodecMemory of those that are kept."""
        return sum(map(len, self._buffers))

    def clear(self) -> None:
        """Gives all of them up."""
        self._buffers.clear()


@dataclass(frozen=True, slots=True)
class StagedPayload:
    """A payload that was put together.

    Attributes:
        data: Its bytes.
        checksum: CRC-32 of what lies behind the one in the payload: of that which has come, whatever the payload says.
        buffer: What it lies in.
    """

    data: memoryview = field(repr=False)
    checksum: int
    buffer: bytearray = field(repr=False)

    @classmethod
    def of(cls, payload: bytes | bytearray) -> StagedPayload:
        """Returns one that lies somewhere in one piece."""
        return cls(memoryview(payload), crc32(memoryview(payload)[CHECKED_FROM:]), bytearray())


@dataclass(slots=True)
class Staging:
    """One payload of one rank, as far as it has come. Its size was found to be within bounds before.

    Attributes:
        total_bytes: Of the whole payload.
        spare: Where its buffer is taken from.
    """

    total_bytes: int
    spare: BufferPool = field(default_factory=BufferPool)
    _buffer: bytearray = field(init=False, repr=False)
    _data: memoryview = field(init=False, repr=False)
    _missing: set[int] = field(init=False, repr=False)
    _checksums: dict[int, int] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Makes room for it."""
        self._buffer = self.spare.take(self.total_bytes + ALIGNMENT)
        self._data = memoryview(self._buffer)[: self.total_bytes]
        self._missing = set(range(0, self.total_bytes, CHUNK_BYTES))

    def problem(self, offset: int, total_bytes: int, size: int) -> str:
        """Says why a chunk cannot be one of this payload; empty if it can."""
        if total_bytes != self.total_bytes:
            return f"a payload of {self.total_bytes} bytes was announced, and now one of {total_bytes}"
        return self.shape_problem(offset, total_bytes, size)

    @staticmethod
    def shape_problem(offset: int, total_bytes: int, size: int) -> str:
        """Says why no payload of that size has such a chunk; empty if one may."""
        if offset < 0 or offset % CHUNK_BYTES or offset >= total_bytes:
            return f"chunks begin at multiples of {CHUNK_BYTES} within the payload"
        if size != min(CHUNK_BYTES, total_bytes - offset):
            return f"a chunk has {CHUNK_BYTES} bytes, but the last one, which has what is left"
        return ""

    def put(self, offset: int, data: bytes | memoryview, checksum: int) -> bool:
        """Puts a chunk in its place; one that is there already stays as it is. Tells whether it was the last one.

        Args:
            offset: Its place.
            data: It.
            checksum: CRC-32 of it.
        """
        if offset not in self._missing:
            return False
        if not self._checksums and not offset and len(data) >= _HEADER_LENGTH.size:
            # Where its first part begins a number may, so that it is summed where it lies. What else this says is looked
            # at later, and by others.
            lead = -(_HEADER_LENGTH.size + int(_HEADER_LENGTH.unpack_from(data)[0])) % ALIGNMENT
            self._data = memoryview(self._buffer)[lead : lead + self.total_bytes]
        self._missing.discard(offset)
        self._checksums[offset] = checksum
        self._data[offset : offset + len(data)] = data
        return not self._missing

    @property
    def size_bytes(self) -> int:
        """CodecMemory that it takes."""
        return len(self._buffer)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._missing

    def take(self) -> StagedPayload:
        """Returns the payload, which is complete."""
        first = min(CHUNK_BYTES, self.total_bytes)
        checksum = 0
        if self.total_bytes > CHECKED_FROM:
            front = crc32(self._data[:CHECKED_FROM])
            checksum = without(self._checksums[0], front, first - CHECKED_FROM)
            for offset in range(CHUNK_BYTES, self.total_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, self.total_bytes - offset)
                checksum = joined(checksum, self._checksums[offset], size)
        return StagedPayload(self._data, checksum, self._buffer)
