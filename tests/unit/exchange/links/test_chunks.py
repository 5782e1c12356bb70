"""Chunks as the bytes of their messages: what protobuf would make of them, and checksums that nothing is read twice for."""

from __future__ import annotations

import zlib

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_exchange import wire
from fulmen_exchange.aggregator.checksum import combine, without
from fulmen_exchange.aggregator.staging import BufferPool, Staging
from fulmen_exchange.aggregator.terms import CHUNK_BYTES
from fulmen_exchange.codecs.codec import Payload
from fulmen_exchange.links.grpc_chunks import ReadChunk, read, split, split_bytes, write

MIB = 2**20


@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(0, 300))
def test_the_checksum_of_parts_is_that_of_the_whole(first: bytes, second: bytes, zeros: int) -> None:
    second += bytes(zeros)
    whole = zlib.crc32(first + second)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == whole
    assert without(whole, zlib.crc32(first), len(second)) == zlib.crc32(second)


def payload_of(size: int) -> Payload:
    """Returns a payload with a part that begins and ends anywhere, and one of float32 behind it."""
    generator = torch.Generator().manual_seed(size)
    first = torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator)
    return Payload(codec="any", version=1, size=size, parts=(first, torch.randn(size // 7, generator=generator)))


def messages_of(payload: Payload, head: pb.GradientChunk) -> list[bytes]:
    pieces = split(wire.front_of(payload), wire.parts_of(payload))
    return [pieces.message(head, number) for number in range(len(pieces.pieces))]


@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_a_payload_in_chunks_is_its_bytes_and_protobuf_reads_each(size: int) -> None:
    payload = payload_of(size)
    head = pb.GradientChunk(round=3, call=2, codec="any", codec_version=1, settings=pb.CallSettings(ratio=4.0))
    whole = bytes(wire.encode(payload))
    messages = messages_of(payload, head)

    for kind in (pb.ExchangeRequest, pb.ExchangeResponse):
        chunks = [kind.FromString(message).chunk for message in messages]
        assert b"".join(chunk.data for chunk in chunks) == whole
        assert [chunk.offset_bytes for chunk in chunks] == list(range(0, len(whole), CHUNK_BYTES))
        assert all(chunk.crc32 == zlib.crc32(chunk.data) for chunk in chunks)
        assert all((chunk.round, chunk.call, chunk.settings.ratio) == (3, 2, 4.0) for chunk in chunks)
        assert all(len(chunk.data) <= MIB and chunk.total_bytes == len(whole) for chunk in chunks)
    assert [split_bytes(whole).message(head, number) for number in range(len(messages))] == messages


chunks_of_any_kind = st.builds(
    pb.GradientChunk,
    membership_epoch=st.integers(0, 2**62),
    round=st.integers(-(2**40), 2**40),
    codec=st.sampled_from(["", "topk", "é" * 100]),
    data=st.binary(max_size=400),
    crc32=st.integers(0, 2**32 - 1),
    call=st.integers(0, 2**31 - 1),
    settings=st.builds(pb.CallSettings, ratio=st.floats(allow_nan=False), flush=st.booleans()),
)


@given(chunks_of_any_kind)
def test_what_protobuf_writes_is_read_without_a_copy_of_the_data(chunk: pb.GradientChunk) -> None:
    found = read(pb.ExchangeRequest, pb.ExchangeRequest(chunk=chunk).SerializeToString())
    assert isinstance(found, ReadChunk)
    assert bytes(found.data) == chunk.data
    assert found.head == pb.GradientChunk.FromString(chunk.SerializeToString()) or found.head.data == b""
    found.head.data = chunk.data
    assert found.head == chunk


@given(chunks_of_any_kind, st.data())
def test_bytes_that_are_damaged_are_what_protobuf_takes_them_for(chunk: pb.GradientChunk, data: st.DataObject) -> None:
    message = bytearray(pb.ExchangeRequest(chunk=chunk).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if message:
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    del message[data.draw(st.integers(0, len(message))) :]
    try:
        wanted = pb.ExchangeRequest.FromString(bytes(message))
    except DecodeError:
        with pytest.raises(DecodeError):
            read(pb.ExchangeRequest, bytes(message))
        return
    found = read(pb.ExchangeRequest, bytes(message))
    assert isinstance(found, ReadChunk) == wanted.HasField("chunk")
    if isinstance(found, ReadChunk):
        assert bytes(found.data) == wanted.chunk.data


def test_messages_that_are_no_chunks_go_through_as_they_are() -> None:
    opened = pb.ExchangeRequest(open=pb.OpenExchange(training_run="projects/default/trainingRuns/1", rank=3))
    assert read(pb.ExchangeRequest, write(opened)) == opened
    status = pb.ExchangeResponse(status=pb.SegmentStatus(round=2))
    assert read(pb.ExchangeResponse, write(status)) == status


@pytest.mark.parametrize("size", [1, 1000, 2 * CHUNK_BYTES + 3])
def test_what_was_put_together_is_decoded_where_it_lies(size: int) -> None:
    payload = payload_of(size)
    pool = BufferPool(max_buffers=1)
    pieces = split(wire.front_of(payload), wire.parts_of(payload))
    head = pb.GradientChunk()
    for _ in range(2):
        staging = Staging(pieces.size, pool)
        for number in range(len(pieces.pieces)):
            chunk = read(pb.ExchangeRequest, pieces.message(head, number))
            assert isinstance(chunk, ReadChunk)
            staging.put(chunk.head.offset_bytes, chunk.data, chunk.head.crc32)
        staged = staging.take()
        found = wire.decode(staged.data, checksum=staged.checksum, copies=False)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.parts, payload.parts, strict=True))
        # A number of float32 lies where it may, or was copied; bytes are never.
        begin = torch.frombuffer(staged.buffer, dtype=torch.uint8).data_ptr()
        assert begin <= found.parts[0].data_ptr() < begin + len(staged.buffer)
        pool.give(staged.buffer)


def test_buffers_are_used_again_where_they_fit() -> None:
    pool = BufferPool(max_buffers=2)
    large, small = bytearray(4 * MIB), bytearray(MIB)
    pool.give(large)
    pool.give(small)
    pool.give(bytearray(100))  # not worth it
    assert pool.take(MIB - 5) is small
    assert pool.take(MIB) is not large  # four times as large
    assert pool.take(3 * MIB) is large
    assert len(pool.take(3 * MIB)) == 3 * MIB
