"""Payloads as bytes: a header that names codec, version and parts, the parts, and a checksum over both.

Little-endian: `FGX1`, CRC-32 (ISO-HDLC, as in zlib) of all that follows it, length of the header, the header
(`fulmen.algorithm.v1.PayloadHeader`), the parts one after another.
"""

from __future__ import annotations

import struct

import numpy
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from fulmen.algorithm.v1.gradient_exchange_pb2 import PayloadHeader, PayloadPart
from fulmen_exchange.aggregator.checksum import crc32
from fulmen_exchange.codecs.codec import Payload, PayloadInvalid

MAGIC = b"FGX1"
CHECKED_FROM = 8
"""Where what the checksum covers begins."""
MAX_PARTS = 8
"""Of one payload; no codec has more."""
_FRONT = struct.Struct("<4sII")
_KINDS = {
    PayloadPart.KIND_INT8: torch.int8,
    PayloadPart.KIND_UINT8: torch.uint8,
    PayloadPart.KIND_INT16: torch.int16,
    PayloadPart.KIND_BFLOAT16: torch.bfloat16,
    PayloadPart.KIND_FLOAT32: torch.float32,
    PayloadPart.KIND_FLOAT16: torch.float16,
}
_KIND_OF = {dtype: kind for kind, dtype in _KINDS.items()}


def is_known(dtype: torch.dtype) -> bool:
    """Tells whether parts may have numbers of that kind."""
    return dtype in _KIND_OF


def encode(payload: Payload) -> bytearray:
    """Makes the bytes of a payload."""
    front = front_of(payload)
    out = bytearray().join((front, *parts_of(payload)))
    seal(out, crc32(memoryview(out)[CHECKED_FROM:]))
    return out


def front_of(payload: Payload) -> bytearray:
    """Makes what stands before the parts of a payload; its checksum is left to `seal`."""
    parts = [PayloadPart(kind=_KIND_OF[part.dtype], count=part.numel()) for part in payload.parts]
    header = PayloadHeader(
        codec=payload.codec, codec_version=payload.version, element_count=payload.size, parts=parts
    ).SerializeToString(deterministic=True)
    return bytearray(_FRONT.pack(MAGIC, 0, len(header)) + header)


def parts_of(payload: Payload) -> list[memoryview]:
    """Returns the bytes of the parts, as they lie in memory: they change with the tensors, unless those are of a GPU."""
    return [part.detach().cpu().contiguous().view(torch.uint8).numpy().data for part in payload.parts if part.numel()]


def seal(front: bytearray, checksum: int) -> None:
    """Writes a checksum in its place."""
    struct.pack_into("<I", front, len(MAGIC), checksum)


def parts_begin(data: bytes | memoryview) -> int:
    """Tells where the parts of a payload begin, from its first bytes; 0 if that cannot be."""
    return _FRONT.size + int(_FRONT.unpack_from(data)[2]) if len(data) >= _FRONT.size else 0


def decode(
    data: bytes | bytearray | memoryview,
    *,
    device: torch.device | str = "cpu",
    checksum: int | None = None,
    copies: bool = True,
) -> Payload:
    """Reads the bytes of a payload.

    Args:
        data: It.
        device: Of the tensors.
        checksum: CRC-32 of what lies behind the one in the payload, where somebody has computed it; else it is.
        copies: Whether the tensors are copies; if not, they may be the bytes themselves.

    Raises:
        PayloadInvalid: if they are damaged, cut off, or of another format.
    """
    view = memoryview(data)
    if len(view) < _FRONT.size:
        raise PayloadInvalid("shorter than its header")
    magic, wanted, length = _FRONT.unpack_from(view)
    if magic != MAGIC:
        raise PayloadInvalid("no payload of this format")
    if (crc32(view[CHECKED_FROM:]) if checksum is None else checksum) != wanted:
        raise PayloadInvalid("its checksum is wrong")
    try:
        header = PayloadHeader.FromString(bytes(view[_FRONT.size : _FRONT.size + length]))
    except DecodeError:
        raise PayloadInvalid("its header cannot be read") from None
    if header.element_count < 0:
        raise PayloadInvalid("its number of elements is negative")
    begin = _FRONT.size + length
    if begin > len(view) or len(header.parts) > MAX_PARTS:
        raise PayloadInvalid("its header is cut off, or names too many parts")
    parts: list[Tensor] = []
    for part in header.parts:
        dtype = _KINDS.get(part.kind)
        if dtype is None or part.count < 0:
            raise PayloadInvalid("a part is of no known kind")
        end = begin + part.count * dtype.itemsize
        if end > len(view):
            raise PayloadInvalid("a part is cut off")
        parts.append(_tensor(view[begin:end], dtype, copies=copies).to(device))
        begin = end
    if begin != len(view):
        raise PayloadInvalid("there is more than its parts")
    return Payload(codec=header.codec, version=header.codec_version, size=header.element_count, parts=tuple(parts))


def _tensor(view: memoryview, dtype: torch.dtype, *, copies: bool) -> Tensor:
    if not len(view):
        return torch.empty(0, dtype=dtype)  # of no bytes torch makes no other kind
    raw = numpy.frombuffer(view, dtype=numpy.uint8)
    # A tensor begins where its elements may.
    if copies or view.readonly or raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype)
