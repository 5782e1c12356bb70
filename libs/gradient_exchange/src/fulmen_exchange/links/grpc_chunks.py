"""Chunks of payloads as serialised messages, without protobuf's copy of their data.

`ExchangeRequest` and `ExchangeResponse` have their chunk in the same field, so one message serves both directions.
Invariant: any protobuf library can read what is written here, and vice versa; `data` is written last and read in place.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_exchange.aggregator.checksum import combine, crc32
from fulmen_exchange.aggregator.terms import CHUNK_BYTES

CHUNK_TAG = b"\x0a"
"""Field 1 of either message, length-delimited."""
DATA_TAG = 8 << 3 | 2
DATA_FIELD = bytes([DATA_TAG])
CHECKED_FROM = 8
"""First byte of a payload covered by its own checksum, which is before it."""

Message = TypeVar("Message", pb.ExchangeRequest, pb.ExchangeResponse)


_HEAD: Final = struct.Struct("<qqiiiqqIqdqB")


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """A received chunk.

    Attributes:
        head: All fields except the data.
        data: The data, within the bytes of the message.
    """

    head: pb.GradientChunk
    data: memoryview = field(repr=False)

    @property
    def has_intact_head(self) -> bool:
        """Whether the head matches its checksum; nothing may be concluded from one that does not."""
        return head_checksum(self.head) == self.head.head_crc32


def head_checksum(head: pb.GradientChunk) -> int:
    """Returns the checksum of a chunk's head, which includes that of its data."""
    settings = head.settings
    numbers = _HEAD.pack(
        head.membership_epoch, head.round, head.call, head.bucket, head.codec_version, head.offset_bytes,
        head.total_bytes, head.crc32, settings.number, settings.ratio, settings.seed, settings.flush,
    )  # fmt: skip
    return zlib.crc32(head.codec.encode(), zlib.crc32(numbers))


@dataclass(frozen=True, slots=True)
class ChunkedPayload:
    """A payload split into chunks without joining its parts.

    Attributes:
        pieces: Memory of each chunk, which must not change until sent.
        checksums: CRC-32 of each chunk.
        size: Bytes of the payload.
    """

    pieces: tuple[tuple[memoryview, ...], ...] = field(repr=False)
    checksums: tuple[int, ...]
    size: int

    def message(self, head: pb.GradientChunk, number: int) -> bytes:
        """Returns the message of a chunk; fills in its head.

        Args:
            head: Fields common to all chunks of the payload.
            number: Index of the chunk, from 0.
        """
        head.offset_bytes = number * CHUNK_BYTES
        head.total_bytes = self.size
        head.crc32 = self.checksums[number]
        head.head_crc32 = head_checksum(head)
        written = head.SerializeToString()
        size = min(CHUNK_BYTES, self.size - head.offset_bytes)
        length = _varint(size)
        whole = _varint(len(written) + 1 + len(length) + size)
        return b"".join((CHUNK_TAG, whole, written, DATA_FIELD, length, *self.pieces[number]))


def split(front: bytearray, parts: Iterable[memoryview]) -> ChunkedPayload:
    """Splits a payload given in parts; writes its checksum into its front.

    Args:
        front: Everything before the parts, at most one chunk long.
        parts: Flat bytes of the parts.
    """
    pieces = _pieces([memoryview(front), *parts])
    first = memoryview(front)[CHECKED_FROM:]
    checksums = [_checksum((first, *pieces[0][1:])), *map(_checksum, pieces[1:])]
    sizes = [sum(map(len, each)) for each in pieces]
    whole = checksums[0]
    for checksum, size in zip(checksums[1:], sizes[1:], strict=True):
        whole = combine(whole, checksum, size)
    front[4:CHECKED_FROM] = whole.to_bytes(4, "little")
    checksums[0] = combine(crc32(front[:CHECKED_FROM]), checksums[0], sizes[0] - CHECKED_FROM)
    return ChunkedPayload(tuple(pieces), tuple(checksums), sum(sizes))


def split_bytes(data: bytes | bytearray | memoryview) -> ChunkedPayload:
    """Splits the bytes of a payload."""
    pieces = _pieces([memoryview(data)])
    return ChunkedPayload(tuple(pieces), tuple(map(_checksum, pieces)), len(data))


def read(kind: type[Message], message: bytes) -> ReadChunk | Message:
    """Parses a message; the data of a chunk is not copied.

    Raises:
        DecodeError: if the message is malformed.
    """
    found = _data_of(memoryview(message)) if message[:1] == CHUNK_TAG else None
    if found is None:
        whole = kind.FromString(message)
        return ReadChunk(whole.chunk, memoryview(whole.chunk.data)) if whole.HasField("chunk") else whole
    begin, field_begin, data_begin, end = found
    head = pb.GradientChunk.FromString(message[begin:field_begin] + message[end:])
    return ReadChunk(head, memoryview(message)[data_begin:end])


def write(message: bytes | pb.ExchangeRequest | pb.ExchangeResponse) -> bytes:
    """Serialises a message; chunks already are."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _data_of(view: memoryview) -> tuple[int, int, int, int] | None:
    """Locates the data of a message that consists of a chunk; None for any other message.

    Returns:
        Where the chunk begins, the data's field, the data, and where the data ends.
    """
    try:
        length, begin = _number(view, 1)
        if begin + length != len(view):
            return None
        found, place = None, begin
        while place < len(view):
            field_begin = place
            tag, place = _number(view, place)
            match tag & 7:
                case 0:
                    _, place = _number(view, place)
                case 1:
                    place += 8
                case 2:
                    length, place = _number(view, place)
                    if tag == DATA_TAG:
                        if found is not None:
                            return None
                        found = (begin, field_begin, place, place + length)
                    place += length
                case 5:
                    place += 4
                case _:
                    return None
        return found if place == len(view) else None
    except IndexError:
        raise DecodeError("truncated") from None


def _number(view: memoryview, place: int) -> tuple[int, int]:
    """Reads a varint; returns it and the position after it."""
    value = shift = 0
    while True:
        byte = view[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise DecodeError("malformed varint")


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _pieces(parts: Iterable[memoryview]) -> list[tuple[memoryview, ...]]:
    """Splits scattered bytes into chunks."""
    chunks: list[tuple[memoryview, ...]] = []
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        for begin, end in _runs(len(part), room):
            pieces.append(part[begin:end])
            room -= end - begin
            if not room:
                chunks.append(tuple(pieces))
                pieces, room = [], CHUNK_BYTES
    if pieces:
        chunks.append(tuple(pieces))
    return chunks


def _runs(size: int, room: int) -> Iterator[tuple[int, int]]:
    begin = 0
    while begin < size:
        end = min(size, begin + room)
        yield begin, end
        begin, room = end, CHUNK_BYTES


def _checksum(pieces: Iterable[memoryview]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return checksum
