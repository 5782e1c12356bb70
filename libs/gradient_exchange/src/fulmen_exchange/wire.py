"""Payloads as bytes: a header that names codec, version and parts, the parts, and a checksum over both.

Little-endian: `FGX1`, CRC-32 (ISO-HDLC, as in zlib) of everything after it, length of the header, the header
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
"""First byte covered by the checksum."""
MAX_PARTS = 8
"""Parts of one payload; no codec has more."""
_FRONT = struct.Struct("<4sII")
_KINDS = {
    PayloadPart.KIND_INT8: torch.int8,
    PayloadPart.KIND_UINT8: torch.uint8,
    PayloadPart.KIND_INT16: torch.int16,
    PayloadPart.KIND_BFLOAT16: torch.bfloat16,
    PayloadPart.KIND_FLOAT32: torch.float32,
    PayloadPart.KIND_FLOAT16: torch.float16,
    PayloadPart.KIND_INT32: torch.int32,
}
_KIND_OF = {dtype: kind for kind, dtype in _KINDS.items()}


def is_known(dtype: torch.dtype) -> bool:
    """Returns whether a payload can carry tensors of a type."""
    return dtype in _KIND_OF


def encode(payload: Payload) -> bytearray:
    """Serialises a payload."""
    front = front_of(payload)
    out = bytearray().join((front, *parts_of(payload)))
    seal(out, crc32(memoryview(out)[CHECKED_FROM:]))
    return out


def front_of(payload: Payload) -> bytearray:
    """Returns everything before the parts of a payload; `seal` fills in the checksum."""
    parts = [PayloadPart(kind=_KIND_OF[part.dtype], count=part.numel()) for part in payload.parts]
    header = PayloadHeader(
        codec=payload.codec, codec_version=payload.version, element_count=payload.size, parts=parts
    ).SerializeToString(deterministic=True)
    return bytearray(_FRONT.pack(MAGIC, 0, len(header)) + header)


def parts_of(payload: Payload) -> list[memoryview]:
    """Returns the bytes of the parts without a copy: they change with the tensors, unless those are on a GPU."""
    return [part.detach().cpu().contiguous().view(torch.uint8).numpy().data for part in payload.parts if part.numel()]


def seal(front: bytearray, checksum: int) -> None:
    """Writes the checksum into the front of a payload."""
    struct.pack_into("<I", front, len(MAGIC), checksum)


def parts_begin(data: bytes | memoryview) -> int:
    """Returns where the parts begin, from the first bytes of a payload; 0 if there are too few."""
    return _FRONT.size + int(_FRONT.unpack_from(data)[2]) if len(data) >= _FRONT.size else 0


def decode(
    data: bytes | bytearray | memoryview,
    *,
    device: torch.device | str = "cpu",
    checksum: int | None = None,
    copies: bool = True,
) -> Payload:
    """Parses a payload.

    Args:
        data: Bytes of the payload.
        device: Device of the tensors.
        checksum: CRC-32 of the checked bytes, if already computed.
        copies: Whether to copy the tensors; otherwise they may share memory with `data`.

    Raises:
        PayloadInvalid: if the bytes are damaged, truncated or of another format.
    """
    view = memoryview(data)
    if len(view) < _FRONT.size:
        raise PayloadInvalid("shorter than its header")
    magic, wanted, length = _FRONT.unpack_from(view)
    if magic != MAGIC:
        raise PayloadInvalid("not a payload of this format")
    if (crc32(view[CHECKED_FROM:]) if checksum is None else checksum) != wanted:
        raise PayloadInvalid("wrong checksum")
    try:
        header = PayloadHeader.FromString(bytes(view[_FRONT.size : _FRONT.size + length]))
    except DecodeError:
        raise PayloadInvalid("malformed header") from None
    if header.element_count < 0:
        raise PayloadInvalid("negative number of elements")
    begin = _FRONT.size + length
    if begin > len(view) or len(header.parts) > MAX_PARTS:
        raise PayloadInvalid("truncated header, or too many parts")
    parts: list[Tensor] = []
    for part in header.parts:
        dtype = _KINDS.get(part.kind)
        if dtype is None or part.count < 0:
            raise PayloadInvalid("part of unknown type")
        end = begin + part.count * dtype.itemsize
        if end > len(view):
            raise PayloadInvalid("truncated part")
        parts.append(_tensor(view[begin:end], dtype, copies=copies).to(device))
        begin = end
    if begin != len(view):
        raise PayloadInvalid("trailing bytes")
    return Payload(codec=header.codec, version=header.codec_version, size=header.element_count, parts=tuple(parts))


def _tensor(view: memoryview, dtype: torch.dtype, *, copies: bool) -> Tensor:
    if not len(view):
        return torch.empty(0, dtype=dtype)  # torch cannot view an empty tensor as another type
    raw = numpy.frombuffer(view, dtype=numpy.uint8)
    # Tensors must be aligned to their elements.
    if copies or view.readonly or raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype)
