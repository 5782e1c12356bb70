"""Vectorised LEB128: arrays of integers as bytes, seven bits to a byte, lowest first."""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
MAX_BYTES = 10
_PAYLOAD = 0x7F
_MORE = 0x80


def pack_varints(values: NDArray[np.uint64]) -> Bytes:
    """Writes each number with as few bytes as it needs."""
    if not values.size or values.max() < _MORE:
        return values.astype(np.uint8)
    lengths = np.ones(values.size, dtype=np.int64)
    rest = values >> np.uint64(7)
    while rest.any():
        lengths += rest != 0
        rest >>= np.uint64(7)
    starts = np.cumsum(lengths) - lengths
    packed = np.empty(int(lengths.sum()), dtype=np.uint8)
    for place in range(int(lengths.max(initial=0))):
        here = slice(None) if place == 0 else np.flatnonzero(lengths > place)
        low = (values[here] >> np.uint64(7 * place)).astype(np.uint8) & np.uint8(_PAYLOAD)
        more = (lengths[here] > place + 1).astype(np.uint8) << np.uint8(7)
        packed[starts[here] + place] = low | more
    return packed


def unpack_varints(packed: Bytes, count: int) -> NDArray[np.uint64]:
    """Reads `count` numbers.

    Raises:
        ValueError: if the bytes hold another count, or end in the middle of a number.
    """
    last = packed < _MORE
    if packed.size == count and last.all():
        return packed.astype(np.uint64)
    ends = np.flatnonzero(last)
    if ends.size != count or (packed.size and not last[-1]):
        raise ValueError(f"The bytes do not hold {count} numbers.")
    starts = np.empty(count, dtype=np.int64)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    if lengths.max(initial=0) > MAX_BYTES:
        raise ValueError("A number has too many bytes.")
    values = (packed[starts] & np.uint8(_PAYLOAD)).astype(np.uint64)
    for place in range(1, int(lengths.max(initial=0))):
        here = np.flatnonzero(lengths > place)
        part = (packed[starts[here] + place] & np.uint8(_PAYLOAD)).astype(np.uint64)
        values[here] |= part << np.uint64(7 * place)
    return values
