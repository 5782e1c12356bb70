"""The pieces in which an uncompressed tensor is sent to shards; the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fulmen_exchange.aggregator.terms import CHUNK_BYTES

SMALL = 65_536
"""Tensors up to this many elements are summed by one shard, so that all of it is the sum of the same ranks."""
LEAST_BYTES = 2**16
"""Of the short pieces, as of the setting."""
FRONT_BYTES = 256
"""Space in the first chunk of a piece for the data before its elements."""


def waves(flat: Tensor, shards: int, piece_bytes: int) -> Iterator[Sequence[Tensor]]:
    """Splits a flat tensor into waves of one piece per shard; a small tensor is sent to one shard."""
    size = flat.numel()
    if size <= SMALL:
        yield from ((flat,),) if size else ()
        return
    begin, width = 0, flat.element_size()
    for wave in _sizes(
        size, *(shards * (_fitting(max(LEAST_BYTES, piece_bytes // part)) // width) for part in (4, 2, 1))
    ):
        yield flat[begin : begin + wave].split(-(-wave // shards))
        begin += wave


def _sizes(size: int, quarter: int, half: int, whole: int) -> list[int]:
    """Returns the sizes of waves. The first and last are short: nothing comes down while the first go up, or the reverse."""
    body = size - 2 * (quarter + half)
    if body < 0:
        return _runs(size, quarter)
    return [quarter, half, *_runs(body, whole), half, quarter]


def _runs(size: int, longest: int) -> list[int]:
    return [min(longest, size - begin) for begin in range(0, size, longest)]


def _fitting(piece_bytes: int) -> int:
    """Returns so many bytes of a piece that with its header it fills whole chunks: each chunk takes processors' time."""
    chunks = round(piece_bytes / CHUNK_BYTES)
    return chunks * CHUNK_BYTES - FRONT_BYTES if chunks else piece_bytes
