"""Numbers as few bytes: differences of words as small numbers, and small numbers as varints."""

import numpy as np

from fulmen_algorithm.weights.tensor_files import Bytes, Words

MAX_BYTES = 10
_PAYLOAD = 0x7F
_MORE = 0x80


def steps(old: Words, new: Words) -> Words:
    """Maps differences modulo the width, small ones of either sign to small numbers (zigzag)."""
    steps = new - old  # wraps around at the width
    negative = steps >> (old.itemsize * 8 - 1)
    # All bits of a negative step are turned over: 0 - 1 has all bits.
    found: Words = (steps << 1) ^ (np.zeros_like(steps) - negative)
    return found


def stepped(old: Words, steps: Words) -> Words:
    """Undoes `steps`.

    Raises:
        ValueError: if a step is wider than an element.
    """
    if steps.size and int(steps.max()) >= 2 ** (old.itemsize * 8):
        raise ValueError("A step is wider than an element.")
    narrow = steps.astype(old.dtype, copy=False)
    moved = (narrow >> 1) ^ (np.zeros_like(narrow) - (narrow & 1))
    found: Words = old + moved
    return found


def pack_varints(values: Words) -> Bytes:
    """Writes each number with as few bytes as it needs."""
    if not values.size or values.max() < _MORE:
        return values.astype(np.uint8)
    lengths = np.ones(values.size, dtype=np.int64)
    rest = values >> 7
    while rest.any():
        lengths += rest != 0
        rest >>= 7
    starts = np.cumsum(lengths) - lengths
    packed = np.empty(int(lengths.sum()), dtype=np.uint8)
    for place in range(int(lengths.max(initial=0))):
        here = slice(None) if place == 0 else np.flatnonzero(lengths > place)
        low = (values[here] >> (7 * place)).astype(np.uint8) & np.uint8(_PAYLOAD)
        more = (lengths[here] > place + 1).astype(np.uint8) << np.uint8(7)
        packed[starts[here] + place] = low | more
    return packed


def unpack_varints(packed: Bytes, count: int) -> Words:
    """Reads `count` numbers, as bytes if each has one.

    Raises:
        ValueError: if the bytes hold another count, or end in the middle of a number.
    """
    last = packed < _MORE
    if packed.size == count and last.all():
        return packed
    ends = np.flatnonzero(last)
    if ends.size != count or (packed.size and not last[-1]):
        raise ValueError(f"The bytes do not contain {count} numbers.")
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
