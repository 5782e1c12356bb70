"""Chunks of payloads as the bytes of their messages, without a copy that protobuf would make of what they carry.

`ExchangeRequest` and `ExchangeResponse` have their chunk in the same field, so one message serves both ways. Invariant:
what is written here, any protobuf library reads, and the other way round; `data` is only written last, and read in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_exchange.aggregator.checksum import crc32, joined
from fulmen_exchange.aggregator.terms import CHUNK_BYTES

CHUNK_TAG = b"\x0a"
"""Field 1 of either message, length-delimited."""
DATA_TAG = 8 << 3 | 2
DATA_FIELD = bytes([DATA_TAG])
CHECKED_FROM = 8
"""Bytes at the beginning of a payload that its own checksum leaves out: it is among them."""

Message = TypeVar("Message", pb.ExchangeRequest, pb.ExchangeResponse)


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """A chunk as it came.

    Attributes:
        head: All of it but the data.
        data: The data, in the bytes of the message.
    """

    head: pb.GradientChunk
    data: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class CutPayload:
    """A payload, cut into chunks that are not put together before they are sent.

    Attributes:
        pieces: Of each chunk what it consists of, in memory that must not change meanwhile.
        checksums: CRC-32 of each chunk.
        size: Bytes of the payload.
    """

    pieces: tuple[tuple[memoryview, ...], ...] = field(repr=False)
    checksums: tuple[int, ...]
    size: int

    def message(self, head: pb.GradientChunk, number: int) -> bytes:
        """Returns the message of a chunk; fills its head in.

        Args:
            head: What is the same for all chunks of the payload.
            number: Which chunk, from 0.
        """
        head.offset_bytes = number * CHUNK_BYTES
        head.total_bytes = self.size
        head.crc32 = self.checksums[number]
        written = head.SerializeToString()
        size = min(CHUNK_BYTES, self.size - head.offset_bytes)
        length = _varint(size)
        whole = _varint(len(written) + 1 + len(length) + size)
        return b"".join((CHUNK_TAG, whole, written, DATA_FIELD, length, *self.pieces[number]))


def cut(front: bytearray, parts: Iterable[memoryview]) -> CutPayload:
    """Cuts a payload that is not put together; writes its checksum into its front.

    Args:
        front: What stands before the parts, at most a chunk long.
        parts: Its parts, flat bytes.
    """
    pieces = _pieces([memoryview(front), *parts])
    first = memoryview(front)[CHECKED_FROM:]
    checksums = [_checksum((first, *pieces[0][1:])), *map(_checksum, pieces[1:])]
    sizes = [sum(map(len, each)) for each in pieces]
    whole = checksums[0]
    for checksum, size in zip(checksums[1:], sizes[1:], strict=True):
        whole = joined(whole, checksum, size)
    front[4:CHECKED_FROM] = whole.to_bytes(4, "little")
    checksums[0] = joined(crc32(front[:CHECKED_FROM]), checksums[0], sizes[0] - CHECKED_FROM)
    return CutPayload(tuple(pieces), tuple(checksums), sum(sizes))


def cut_bytes(data: bytes | bytearray | memoryview) -> CutPayload:
    """Cuts the bytes of a payload."""
    pieces = _pieces([memoryview(data)])
    return CutPayload(tuple(pieces), tuple(map(_checksum, pieces)), len(data))


def read(kind: type[Message], message: bytes) -> ReadChunk | Message:
    """Reads a message: a chunk without a copy of its data, anything else as it is.

    Raises:
        DecodeError: if it is none.
    """
    found = _data_of(memoryview(message)) if message[:1] == CHUNK_TAG else None
    if found is None:
        whole = kind.FromString(message)
        return ReadChunk(whole.chunk, memoryview(whole.chunk.data)) if whole.HasField("chunk") else whole
    begin, field_begin, data_begin, end = found
    head = pb.GradientChunk.FromString(message[begin:field_begin] + message[end:])
    return ReadChunk(head, memoryview(message)[data_begin:end])


def write(message: bytes | pb.ExchangeRequest | pb.ExchangeResponse) -> bytes:
    """Returns the bytes of a message, of which chunks are already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _data_of(view: memoryview) -> tuple[int, int, int, int] | None:
    """Finds the data of the only field of a message, which is a chunk; None if it has another shape.

    Returns:
        Where the chunk begins, the field of its data, the data, and where this ends.
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
        raise DecodeError("cut off") from None


def _number(view: memoryview, place: int) -> tuple[int, int]:
    """Reads a varint; returns it, and where it ends."""
    value = shift = 0
    while True:
        byte = view[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise DecodeError("no number")


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _pieces(parts: Iterable[memoryview]) -> list[tuple[memoryview, ...]]:
    """Deals bytes that lie in several places out to chunks."""
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
