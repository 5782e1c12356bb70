"""Assembles the chunks of payloads."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from fulmen_exchange.aggregator.checksum import combine, crc32, without
from fulmen_exchange.aggregator.terms import CHUNK_BYTES

ALIGNMENT = 16
CHECKED_FROM = 8
"""First byte of a payload covered by its own checksum, which is before it."""
_HEADER_LENGTH = struct.Struct("<8xI")


@dataclass(slots=True)
class BufferPool:
    """Buffers of finished payloads, reused for the next ones: allocation costs more than arithmetic.

    Attributes:
        max_buffers: Most buffers to hold.
    """

    max_buffers: int = 0
    _buffers: list[bytearray] = field(default_factory=list, repr=False)

    def take(self, size: int) -> bytearray:
        """Returns a buffer of at least `size` and at most twice as many bytes."""
        fitting = [buffer for buffer in self._buffers if size <= len(buffer) <= 2 * size]
        if not fitting:
            return bytearray(size)
        best = min(fitting, key=len)
        # By identity: comparing contents would be slow.
        self._buffers = [buffer for buffer in self._buffers if buffer is not best]
        return best

    def give(self, buffer: bytearray) -> None:
        """Returns a buffer to the pool."""
        if len(buffer) >= CHUNK_BYTES:
            self._buffers.append(buffer)
            del self._buffers[: max(0, len(self._buffers) - self.max_buffers)]

    @property
    def size_bytes(self) -> int:
        """Bytes of the pooled buffers."""
        return sum(map(len, self._buffers))

    def clear(self) -> None:
        """Releases all buffers."""
        self._buffers.clear()


@dataclass(frozen=True, slots=True)
class StagedPayload:
    """A complete payload.

    Attributes:
        data: Bytes of the payload.
        checksum: CRC-32 of the received bytes from `CHECKED_FROM` on, computed independently of the payload.
        buffer: Memory that contains the data.
    """

    data: memoryview = field(repr=False)
    checksum: int
    buffer: bytearray = field(repr=False)

    @classmethod
    def of(cls, payload: bytes | bytearray) -> StagedPayload:
        """Wraps a payload in contiguous memory."""
        return cls(memoryview(payload), crc32(memoryview(payload)[CHECKED_FROM:]), bytearray())


@dataclass(slots=True)
class Staging:
    """A partially received payload, whose size has been checked.

    Attributes:
        total_bytes: Bytes of the whole payload.
        pool: Pool that provides the buffer.
    """

    total_bytes: int
    pool: BufferPool = field(default_factory=BufferPool)
    _buffer: bytearray = field(init=False, repr=False)
    _data: memoryview = field(init=False, repr=False)
    _missing: set[int] = field(init=False, repr=False)
    _checksums: dict[int, int] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Acquires the buffer."""
        self._buffer = self.pool.take(self.total_bytes + ALIGNMENT)
        self._data = memoryview(self._buffer)[: self.total_bytes]
        self._missing = set(range(0, self.total_bytes, CHUNK_BYTES))

    def problem(self, offset: int, total_bytes: int, size: int) -> str:
        """Returns why a chunk cannot belong to this payload; empty if it can."""
        if total_bytes != self.total_bytes:
            return f"payload size changed from {self.total_bytes} to {total_bytes} bytes"
        return self.shape_problem(offset, total_bytes, size)

    @staticmethod
    def shape_problem(offset: int, total_bytes: int, size: int) -> str:
        """Returns why no payload of that size can have such a chunk; empty if one can."""
        if offset < 0 or offset % CHUNK_BYTES or offset >= total_bytes:
            return f"chunks must begin at multiples of {CHUNK_BYTES} within the payload"
        if size != min(CHUNK_BYTES, total_bytes - offset):
            return f"chunks must have {CHUNK_BYTES} bytes, except the last one"
        return ""

    def put(self, offset: int, data: bytes | memoryview, checksum: int) -> bool:
        """Stores a chunk, unless it was stored before; returns whether the payload is complete by it.

        Args:
            offset: Position in the payload.
            data: Data of the chunk.
            checksum: CRC-32 of the data.
        """
        if offset not in self._missing:
            return False
        if not self._checksums and not offset and len(data) >= _HEADER_LENGTH.size:
            # Align the first part, so that it can be summed in place. The rest of the header is checked elsewhere.
            lead = -(_HEADER_LENGTH.size + int(_HEADER_LENGTH.unpack_from(data)[0])) % ALIGNMENT
            self._data = memoryview(self._buffer)[lead : lead + self.total_bytes]
        self._missing.discard(offset)
        self._checksums[offset] = checksum
        self._data[offset : offset + len(data)] = data
        return not self._missing

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return len(self._buffer)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have been received."""
        return not self._missing

    def take(self) -> StagedPayload:
        """Returns the complete payload."""
        first = min(CHUNK_BYTES, self.total_bytes)
        checksum = 0
        if self.total_bytes > CHECKED_FROM:
            front = crc32(self._data[:CHECKED_FROM])
            checksum = without(self._checksums[0], front, first - CHECKED_FROM)
            for offset in range(CHUNK_BYTES, self.total_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, self.total_bytes - offset)
                checksum = combine(checksum, self._checksums[offset], size)
        return StagedPayload(self._data, checksum, self._buffer)
