"""The difference between two tensors of one shape: positions and new values of the elements whose bits changed.

Between two policy versions few elements of 16 bits change: a step of a small learning rate is less than half of the
distance to the next number. Those that do mostly move to a neighbour. So:

- positions: the gaps between changed positions as varints, or a bitmap, whichever is smaller;
- values: the difference of the old and the new word, taken as integers modulo their width, zigzag, as varints; or the
  new words as they are, whichever is smaller;
- each of the two deflated where that makes it smaller by a tenth;
- all words as they are (dense), where that is smaller than the rest.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fulmen_algorithm.weights.tensor_files import Bytes, RawTensor, Words, bytes_tensor, empty_words
from fulmen_algorithm.weights.varints import pack_varints, stepped, steps, unpack_varints

KINDS = ("positions", "values")
"""Streams of a tensor."""
GAPS, BITMAP = "gaps", "bitmap"
STEPS, WORDS = "steps", "words"
DENSE = "dense"
DEFLATE_LEVEL = 1
DEFLATE_WORTH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Encoding of one changed tensor.

    Attributes:
        dtype: Number format of the tensor.
        shape: Shape of the tensor.
        changed: Elements whose bits changed.
        positions: `gaps` or `bitmap`; empty if dense.
        values: `steps`, `words` or `dense`.
        deflated: Inflated size of each deflated stream.
        sha256: Checksum of the resulting tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    changed: int
    positions: str
    values: str
    deflated: Mapping[str, int]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One changed tensor: its entry in the header, and its streams by kind."""

    entry: Encoded
    parts: Mapping[str, RawTensor]


def difference(old: RawTensor, new: RawTensor) -> Difference | None:
    """Encodes one tensor; None if no bit changed."""
    positions = np.flatnonzero(old.words != new.words)
    if positions.size == 0:
        return None
    streams, labels = _smallest(old.words, new.words, positions)
    deflated: dict[str, int] = {}
    parts = {}
    for kind, stream in streams.items():
        small = _deflated(stream)
        if small is not None:
            deflated[kind] = stream.size
        parts[kind] = bytes_tensor(stream if small is None else small)
    entry = Encoded(
        dtype=new.dtype,
        shape=new.shape,
        changed=positions.size,
        deflated=deflated,
        sha256=new.digest(),
        **labels,
    )
    return Difference(entry=entry, parts=parts)


def _smallest(old: Words, new: Words, positions: np.ndarray) -> tuple[dict[str, Bytes], dict[str, Any]]:
    """Chooses the encoding of a tensor; returns its streams and their kinds."""
    gaps: Words = (np.diff(positions, prepend=-1) - 1).astype(np.uint32 if old.size < 2**32 else np.uint64)
    where, values = pack_varints(gaps), pack_varints(steps(old[positions], new[positions]))
    kinds = {"positions": GAPS, "values": STEPS}
    if where.size > -(-old.size // 8):
        kinds["positions"], where = BITMAP, np.packbits(old != new)
    if values.size > positions.size * new.itemsize:
        kinds["values"], values = WORDS, _as_bytes(new[positions])
    if where.size + values.size >= new.nbytes:
        return {"values": _as_bytes(new)}, {"positions": "", "values": DENSE}
    return {"positions": where, "values": values}, kinds


def restored(base: RawTensor, entry: Encoded, parts: Mapping[str, RawTensor]) -> RawTensor:
    """Decodes one tensor.

    Args:
        base: The tensor that it was encoded against.
        entry: How it is encoded.
        parts: Its streams by kind.

    Raises:
        ValueError, KeyError, IndexError, zlib.error: if a stream is damaged or missing.
    """
    values = _inflated(parts["values"], entry.deflated.get("values"))
    if entry.values == DENSE:
        words = _as_words(values, base)
    else:
        where = _inflated(parts["positions"], entry.deflated.get("positions"))
        positions = _positions(where, entry, base.words.size)
        words = empty_words(base.dtype, base.words.size)
        np.copyto(words, base.words)
        if entry.values == STEPS:
            words[positions] = stepped(words[positions], unpack_varints(values, entry.changed))
        else:
            words[positions] = _as_words(values, base)
    return RawTensor(dtype=base.dtype, shape=base.shape, words=words)


def _positions(where: Bytes, entry: Encoded, elements: int) -> np.ndarray:
    """Reads positions, ascending and within the tensor.

    Raises:
        ValueError: if they are invalid, or their number differs from the header's.
    """
    if entry.positions == BITMAP:
        positions = np.flatnonzero(np.unpackbits(where, count=elements))
    else:
        gaps = unpack_varints(where, entry.changed)
        if (gaps >= elements).any():
            raise ValueError("A gap is longer than the tensor.")
        positions = np.cumsum(gaps, dtype=np.int64) + np.arange(gaps.size)
    if positions.size != entry.changed or (positions.size and positions[-1] >= elements):
        raise ValueError("The positions do not match the header.")
    return positions


def _deflated(stream: Bytes) -> Bytes | None:
    """Deflates a stream; None if that saves too little."""
    small = zlib.compress(stream.data, DEFLATE_LEVEL)
    return np.frombuffer(small, dtype=np.uint8) if len(small) < DEFLATE_WORTH * stream.size else None


def _inflated(part: RawTensor, size: int | None) -> Bytes:
    """Inflates a stream to exactly the size in the header.

    Raises:
        ValueError: if it has another size.
        zlib.error: if it is damaged.
    """
    stream: Bytes = part.words.view(np.uint8)
    if size is None:
        return stream
    inflater = zlib.decompressobj()
    content = inflater.decompress(stream.data, size + 1)
    if len(content) != size or not inflater.eof:
        raise ValueError("A deflated stream has the wrong size.")
    return np.frombuffer(content, dtype=np.uint8)


def _as_bytes(words: Words) -> Bytes:
    return np.ascontiguousarray(words).view(np.uint8)


def _as_words(content: Bytes, like: RawTensor) -> Words:
    return np.ascontiguousarray(content).view(like.words.dtype)
