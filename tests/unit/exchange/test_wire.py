"""Payloads as bytes: what was sent comes back, and what was damaged is refused."""

import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen.algorithm.v1.gradient_exchange_pb2 import PayloadHeader, PayloadPart
from fulmen_exchange import wire
from fulmen_exchange.codecs.codec import Payload, PayloadInvalid
from tests.support.exchange.codec_cases import read

KINDS = (torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float32)
SAMPLE = Payload(
    codec="topk",
    version=1,
    size=5000,
    parts=(
        torch.tensor([2, 1], dtype=torch.int16),
        torch.tensor([0, 4095, 903], dtype=torch.int16),
        torch.tensor([1.5, -0.25, 3.0], dtype=torch.bfloat16),
    ),
)


def framed(header: bytes, body: bytes = b"", *, length: int | None = None) -> bytes:
    """Makes the bytes of a payload with a checksum that is right."""
    rest = struct.pack("<I", len(header) if length is None else length) + header + body
    return b"FGX1" + struct.pack("<I", zlib.crc32(rest)) + rest


def header_of(*parts: tuple[int, int], codec: str = "topk", size: int = 5000) -> bytes:
    """Makes a header."""
    named = [PayloadPart(kind=kind, count=count) for kind, count in parts]
    return PayloadHeader(codec=codec, codec_version=1, element_count=size, parts=named).SerializeToString()


def test_the_bytes_are_those_that_are_written_down():
    data = bytes(wire.encode(SAMPLE))
    header = (
        b"\x0a\x04topk\x10\x01\x18\x88\x27"
        + b"\x22\x04\x08\x03\x10\x02"
        + b"\x22\x04\x08\x03\x10\x03\x22\x04\x08\x04\x10\x03"
    )
    body = b"\x02\x00\x01\x00" + b"\x00\x00\xff\x0f\x87\x03" + b"\xc0\x3f\x80\xbe\x40\x40"
    assert data == framed(header, body)
    codec, version, size, parts = read(data)
    assert (codec, version, size) == ("topk", 1, 5000)
    assert [part.tolist() for part in parts] == [[2, 1], [0, 4095, 903], [1.5, -0.25, 3.0]]


@given(
    size=st.integers(0, 2**40),
    codec=st.text(max_size=20),
    kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40)), max_size=wire.MAX_PARTS),
    seed=st.integers(0, 2**31),
)
def test_whatever_is_sent_comes_back_bit_by_bit(size, codec, kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        if count
        else torch.empty(0, dtype=dtype)
        for dtype, count in kinds
    ]
    sent = Payload(codec=codec, version=7, size=size, parts=tuple(parts))
    data = wire.encode(sent)
    assert len(data) >= sent.nbytes
    for form in (data, bytes(data), memoryview(data)):
        back = wire.decode(form)
        assert (back.codec, back.version, back.size, back.nbytes) == (codec, 7, size, sent.nbytes)
        for part, (dtype, count), other in zip(parts, kinds, back.parts, strict=True):
            assert (other.dtype, other.shape) == (dtype, (count,))
            # As bytes: whatever is no number equals nothing.
            assert torch.equal(other.view(torch.uint8), part.view(torch.uint8))
    assert wire.encode(wire.decode(data)) == data


def test_parts_of_a_cut_are_sent_without_what_lies_beside_them():
    whole = torch.arange(100, dtype=torch.int16)
    back = wire.decode(wire.encode(Payload(codec="x", version=1, size=1, parts=(whole[10:13], whole[::50]))))
    assert [part.tolist() for part in back.parts] == [[10, 11, 12], [0, 50]]


def test_what_was_decoded_is_not_changed_by_what_happens_to_the_bytes():
    data = wire.encode(SAMPLE)
    back = wire.decode(data)
    data[:] = bytes(len(data))
    assert back.parts[0].tolist() == [2, 1]


def test_bytes_that_are_cut_off_anywhere_are_refused():
    data = bytes(wire.encode(SAMPLE))
    for end in range(len(data)):
        with pytest.raises(PayloadInvalid):
            wire.decode(data[:end])
    with pytest.raises(PayloadInvalid):
        wire.decode(data + b"\x00")


def test_a_flipped_bit_is_noticed_wherever_it_is():
    data = wire.encode(SAMPLE)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(PayloadInvalid):
            wire.decode(data)
        data[bit // 8] ^= 1 << (bit % 8)
    assert wire.decode(data).size == 5000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "shorter"),
        (b"FGX1", "shorter"),
        (b"FGX2" + framed(header_of())[4:], "not a payload"),
        (framed(header_of(), length=2**32 - 1), "truncated"),
        (framed(header_of((3, 1)), b"\x00\x00", length=1), "malformed"),
        (framed(b"\xff\xff\xff"), "malformed"),
        (framed(b"\x0a\x02\xff\xfe"), "malformed"),
        (framed(header_of((0, 1)), b"\x00"), "unknown type"),
        (framed(header_of((77, 1)), b"\x00"), "unknown type"),
        (framed(header_of((5, -1)), b""), "unknown type"),
        (framed(header_of((5, 2)), bytes(7)), "truncated"),
        (framed(header_of((5, 2**62)), bytes(8)), "truncated"),
        (framed(header_of((5, 2)), bytes(9)), "trailing bytes"),
        (framed(header_of(*[(1, 0)] * 9)), "too many parts"),
        (framed(header_of(size=-1)), "negative"),
    ],
)
def test_a_payload_that_is_none_is_refused_even_if_its_checksum_is_right(data, reason):
    with pytest.raises(PayloadInvalid, match=reason):
        wire.decode(data)


@given(data=st.binary(max_size=60))
def test_any_bytes_with_a_right_checksum_are_decoded_or_refused(data):
    try:
        payload = wire.decode(b"FGX1" + struct.pack("<I", zlib.crc32(data)) + data)
    except PayloadInvalid:
        return
    assert payload.nbytes <= len(data)
