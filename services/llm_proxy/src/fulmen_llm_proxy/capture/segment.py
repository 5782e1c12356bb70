"""A file of the spool: consecutive records, each with its length and checksum.

Layout of a record, little-endian: the mark `FSP1`, uint32 length of the body, uint32 CRC-32 of length
and body, body. The mark lets a reader resume after a damaged record; the checksum covers the length,
so a flipped bit loses one record and never yields a false one.

Invariant: a file only grows at its end; a partial write is truncated.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fulmen_llm_proxy.capture.packed import PackedCalls

MARK = b"FSP1"
_HEAD = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
_FILE_MODE = 0o600
"""Captures contain prompts, so other users must not read them."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The body of a record; `sequence` increases with every record of a spool."""

    sequence: int
    packed: PackedCalls


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Returns the bytes of a record in the file."""
    body = _ENCODER.encode(record)
    return _HEAD.pack(MARK, len(body), _checksum(len(body), body)) + body


@dataclass(slots=True)
class Scan:
    """Parses records, skipping damaged data.

    Attributes:
        end: offset after the last good record.
        damaged: number of damaged ranges, including a torn end.
    """

    data: bytes
    end: int = 0
    damaged: int = 0

    def records(self) -> Iterator[tuple[Record, int]]:
        """Yields each good record with the offset of its end."""
        at = 0
        while at < len(self.data):
            found = _record_at(self.data, at)
            if found is None:
                self.damaged += at == self.end
                at = self.data.find(MARK, at + 1)
                if at < 0:
                    return
                continue
            record, at = found
            self.end = at
            yield record, at


@dataclass(slots=True, kw_only=True)
class Segment:
    """A file, its delivered part, and the calls left in it.

    Attributes:
        sequence: sequence of its first record; files of a lane are read in this order.
        size_bytes: size of the file.
        delivered_bytes: size of the part that the store has.
        records: number of undelivered records.
        waiting: number of undelivered calls by attempt.
    """

    path: Path
    sequence: int
    trainable: bool
    size_bytes: int = 0
    delivered_bytes: int = 0
    records: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    _fd: int = -1

    @property
    def is_delivered(self) -> bool:
        """Whether everything is delivered."""
        return self.delivered_bytes >= self.size_bytes

    def append(self, frames: bytes) -> None:
        """Writes complete records, all or none.

        Raises:
            OSError: if the disk is full or fails; the file is unchanged.
        """
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _FILE_MODE)
        written = 0
        try:
            while written < len(frames):
                written += os.write(self._fd, frames[written:] if written else frames)
        except OSError:
            if written:
                os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += written

    def count(self, packed: PackedCalls) -> None:
        """Adds a record to the counts."""
        self.records += 1
        self.waiting[packed.attempt] = self.waiting.get(packed.attempt, 0) + packed.calls

    def discount(self, packed: PackedCalls) -> None:
        """Removes a record from the counts."""
        self.records -= 1
        left = self.waiting.get(packed.attempt, 0) - packed.calls
        if left > 0:
            self.waiting[packed.attempt] = left
        else:
            self.waiting.pop(packed.attempt, None)

    def records_from(self, start: int) -> Iterator[tuple[Record, int]]:
        """Yields the good records from an offset on, each with the offset of its end.

        Raises:
            OSError: if the file cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(start)
            scan = Scan(file.read())
        for record, end in scan.records():
            yield record, start + end

    def cut(self, size_bytes: int) -> None:
        """Truncates the file.

        Raises:
            OSError: if the disk fails.
        """
        os.truncate(self.path, size_bytes)
        self.size_bytes = size_bytes

    def sync(self) -> None:
        """Syncs the file to disk.

        Raises:
            OSError: if the disk fails.
        """
        if self._fd >= 0:
            os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file; a later append opens it again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def remove(self) -> None:
        """Deletes the file.

        Raises:
            OSError: if the disk fails.
        """
        self.close()
        self.path.unlink(missing_ok=True)


def _record_at(data: bytes, at: int) -> tuple[Record, int] | None:
    if at + _HEAD.size > len(data):
        return None
    mark, length, checksum = _HEAD.unpack_from(data, at)
    start, end = at + _HEAD.size, at + _HEAD.size + length
    if mark != MARK or end > len(data):
        return None
    body = data[start:end]
    if _checksum(length, body) != checksum:
        return None
    try:
        return _DECODER.decode(body), end
    except msgspec.DecodeError:
        return None  # complete, but written by another version


def _checksum(length: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_LENGTH.pack(length)))
