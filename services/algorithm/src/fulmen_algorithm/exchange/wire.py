"""Payloads as bytes: a header that names codec, version and parts, the parts, and a checksum over both.

Little-endian: `FGX1`, CRC-32 (ISO-HDLC, as in zlib) of all that follows it, length of the header, the header
(`fulmen.algorithm.v1.PayloadHeader`), the parts one after another.
"""

from __future__ import annotations

import struct
import zlib

import numpy
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from fulmen.algorithm.v1.gradient_exchange_pb2 import PayloadHeader, PayloadPart
from fulmen_algorithm.exchange.codec import Payload, PayloadInvalid

MAGIC = b"FGX1"
MOST_PARTS = 8
"""Of one payload; no codec has more."""
_FRONT = struct.Struct("<4sII")
_KINDS = {
    PayloadPart.KIND_INT8: torch.int8,
    PayloadPart.KIND_UINT8: torch.uint8,
    PayloadPart.KIND_INT16: torch.int16,
    PayloadPart.KIND_BFLOAT16: torch.bfloat16,
    PayloadPart.KIND_FLOAT32: torch.float32,
}
_KIND_OF = {dtype: kind for kind, dtype in _KINDS.items()}


def encode(payload: Payload) -> bytearray:
    """Makes the bytes of a payload."""
    parts = [PayloadPart(kind=_KIND_OF[part.dtype], count=part.numel()) for part in payload.parts]
    header = PayloadHeader(
        codec=payload.codec, codec_version=payload.version, element_count=payload.size, parts=parts
    ).SerializeToString(deterministic=True)
    out = bytearray(_FRONT.size) + header
    for part in payload.parts:
        if part.numel():
            out += part.detach().cpu().contiguous().view(torch.uint8).numpy().data
    _FRONT.pack_into(out, 0, MAGIC, 0, len(header))
    _FRONT.pack_into(out, 0, MAGIC, zlib.crc32(memoryview(out)[8:]), len(header))
    return out


def decode(data: bytes | bytearray | memoryview, *, device: torch.device | str = "cpu") -> Payload:
    """Reads the bytes of a payload; its tensors are copies.

    Raises:
        PayloadInvalid: if they are damaged, cut off, or of another format.
    """
    view = memoryview(data)
    if len(view) < _FRONT.size:
        raise PayloadInvalid("shorter than its header")
    magic, checksum, length = _FRONT.unpack_from(view)
    if magic != MAGIC:
        raise PayloadInvalid("no payload of this format")
    if zlib.crc32(view[8:]) != checksum:
        raise PayloadInvalid("its checksum is wrong")
    try:
        header = PayloadHeader.FromString(bytes(view[_FRONT.size : _FRONT.size + length]))
    except DecodeError:
        raise PayloadInvalid("its header cannot be read") from None
    if header.element_count < 0:
        raise PayloadInvalid("its number of elements is negative")
    begin = _FRONT.size + length
    if begin > len(view) or len(header.parts) > MOST_PARTS:
        raise PayloadInvalid("its header is cut off, or names too many parts")
    parts: list[Tensor] = []
    for part in header.parts:
        dtype = _KINDS.get(part.kind)
        if dtype is None or part.count < 0:
            raise PayloadInvalid("a part is of no known kind")
        end = begin + part.count * dtype.itemsize
        if end > len(view):
            raise PayloadInvalid("a part is cut off")
        # A copy, so that a part of any kind begins where its elements may; of no bytes torch makes no other kind.
        raw = torch.from_numpy(numpy.frombuffer(view[begin:end], dtype=numpy.uint8).copy())
        parts.append((raw.view(dtype) if part.count else torch.empty(0, dtype=dtype)).to(device))
        begin = end
    if begin != len(view):
        raise PayloadInvalid("there is more than its parts")
    return Payload(codec=header.codec, version=header.codec_version, size=header.element_count, parts=tuple(parts))
