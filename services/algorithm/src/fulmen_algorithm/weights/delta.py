"""Lossless deltas between two sets of weights: positions and new values of the elements whose bits changed.

Between two policy versions few elements of 16 bits change: a step of a small learning rate is less than half of the
distance to the next number. Those that do mostly move to a neighbour. So, for each tensor that changed:

- positions: the gaps between changed positions as varints, or a bitmap, whichever is smaller;
- values: the difference of the old and the new word, taken as integers modulo their width, zigzag, as varints; or the
  new words as they are, whichever is smaller;
- each of the two deflated where that makes it smaller by a tenth;
- all words as they are (dense), where that is smaller than the rest.

A delta is a safetensors file; its header names base and result by checksum, and each changed tensor by its own.
Invariant: `apply` gives exactly the weights that were encoded, or raises and has changed nothing.

Sources of the idea: sparse weight synchronisation in verl, slime and TRL (see docs/weights.md).
"""

import hashlib
import json
import math
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fulmen_algorithm.weights.tensor_files import (
    Bytes,
    RawTensor,
    TensorFileDamaged,
    Weights,
    Words,
    bytes_tensor,
    combined_digest,
    empty_words,
    layout,
    read_tensors,
    write_tensors,
)
from fulmen_algorithm.weights.varints import pack_varints, stepped, steps, unpack_varints

DELTA_FILE = "delta.safetensors"
FORMAT = 1
HEADER, HEADER_SHA256 = "fulmen.delta", "fulmen.delta.sha256"
GAPS, BITMAP = "gaps", "bitmap"
STEPS, WORDS = "steps", "words"
DENSE = "dense"
DEFLATE_LEVEL = 1
DEFLATE_WORTH = 0.9
THREADS = min(4, os.cpu_count() or 1)
"""Tensors that are encoded or decoded at a time."""


class DeltaError(Exception):
    """A delta cannot be created or applied; nothing was changed."""


class TensorsDiffer(DeltaError):
    """Two sets of weights differ in names, types or shapes, so that they have no delta."""


class WrongBase(DeltaError):
    """The delta has another base than the given weights."""


class DeltaDamaged(DeltaError):
    """The file is truncated, altered, or of an unknown format."""


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
class DeltaHeader:
    """Header of a delta.

    Attributes:
        base_sha256: Checksum of the base weights.
        sha256: Checksum of the resulting weights.
        changed: Elements whose bits changed.
        elements: Total number of elements.
        tensors: The tensors that changed.
    """

    base_sha256: str
    sha256: str
    changed: int
    elements: int
    tensors: Mapping[str, Encoded]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSize:
    """Statistics of a written delta.

    Attributes:
        changed: Elements whose bits changed.
        elements: Total number of elements.
        size_bytes: Size of the file.
        full_bytes: Size of the complete weights.
    """

    changed: int
    elements: int
    size_bytes: int
    full_bytes: int

    @property
    def changed_share(self) -> float:
        """Share of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """One changed tensor: its entry in the header, and its streams by kind."""

    entry: Encoded
    parts: Mapping[str, RawTensor]


def _pool() -> ThreadPoolExecutor:
    # Checksums, compression and comparison of large arrays run without the interpreter's lock.
    return ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="delta")


class DeltaWriter:
    """Encodes a delta tensor by tensor, several at a time; what it has encoded is in memory until it is written.

    Close it, also after an error.
    """

    def __init__(self, *, limit_bytes: float = math.inf) -> None:
        """Makes an empty delta; no more is encoded once it is known to have more than `limit_bytes`."""
        self.digests: dict[str, str] = {}
        """Checksums of the new tensors."""
        self._base_digests: dict[str, str] = {}
        self._parts: dict[str, RawTensor] = {}
        self._entries: dict[str, Encoded] = {}
        self._limit_bytes = limit_bytes
        self._elements = self._full_bytes = self._size_bytes = 0
        self._pool = _pool()
        self._begun: deque[tuple[str, Future[_Difference | None]]] = deque()

    def too_large(self) -> bool:
        """Waits for what was added; returns whether the delta has more bytes than its limit."""
        while self._begun:
            self._take()
        return self._size_bytes > self._limit_bytes

    def add(self, name: str, old: RawTensor, old_sha256: str, new: RawTensor) -> None:
        """Encodes one tensor, which must not change before `too_large` or `write`; `old_sha256` is that of the old one."""
        if self._size_bytes > self._limit_bytes:
            return
        self._base_digests[name] = self.digests[name] = old_sha256
        self._elements += new.words.size
        self._full_bytes += new.size_bytes
        self._begun.append((name, self._pool.submit(_difference, old, new)))
        # More would only be held: old and new tensors may have been gathered for this.
        if len(self._begun) > THREADS:
            self._take()

    def _take(self) -> None:
        name, future = self._begun.popleft()
        found = future.result()
        if found is None:
            return
        self.digests[name] = found.entry.sha256
        self._entries[name] = found.entry
        for kind, part in found.parts.items():
            self._parts[f"{name}/{kind}"] = part
            self._size_bytes += part.size_bytes

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)

    def write(self, path: Path) -> DeltaSize:
        """Writes the file.

        Raises:
            OSError: if the disk is full.
        """
        self.too_large()
        header = DeltaHeader(
            base_sha256=combined_digest(self._base_digests),
            sha256=combined_digest(self.digests),
            changed=sum(entry.changed for entry in self._entries.values()),
            elements=self._elements,
            tensors=self._entries,
        )
        text = json.dumps({"format": FORMAT, **asdict(header)}, separators=(",", ":"), sort_keys=True)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        size = write_tensors(path, self._parts, {HEADER: text, HEADER_SHA256: sha256})
        return DeltaSize(changed=header.changed, elements=header.elements, size_bytes=size, full_bytes=self._full_bytes)


def encode(base: Weights, new: Weights, path: Path) -> DeltaSize:
    """Writes the delta from `base` to `new`.

    Raises:
        TensorsDiffer: if names, types or shapes differ.
        OSError: if the disk is full.
    """
    if layout(base.tensors) != layout(new.tensors):
        raise TensorsDiffer("The weights have other names, types or shapes than their base.")
    with closing(DeltaWriter()) as delta:
        for name, tensor in new.tensors.items():
            delta.add(name, base.tensors[name], base.digest_of(name), tensor)
        size = delta.write(path)
        new.digests.update(delta.digests)
    return size


def read_header(path: Path) -> DeltaHeader:
    """Reads the header of a delta.

    Raises:
        DeltaDamaged: if it is truncated, altered, or of another format.
        OSError: if it cannot be read.
    """
    return _opened(path)[0]


def apply(base: Weights, path: Path) -> Weights:
    """Applies a delta; unchanged tensors are shared with `base`.

    Raises:
        WrongBase: if the delta has another base.
        DeltaDamaged: if the file is truncated or altered.
        OSError: if it cannot be read.
    """
    header, parts = _opened(path)
    if header.base_sha256 != base.sha256():
        raise WrongBase(f"The delta applies to weights {header.base_sha256[:12]}, these are {base.sha256()[:12]}.")

    def decoded(name: str) -> tuple[RawTensor, str]:
        tensor = _decoded(name, header.tensors[name], base, parts)
        return tensor, tensor.digest()

    with _pool() as pool:
        found = dict(zip(header.tensors, pool.map(decoded, header.tensors), strict=True))
    changed = {name: tensor for name, (tensor, _) in found.items()}
    digests = {name: base.digest_of(name) for name in base.tensors} | {
        name: sha256 for name, (_, sha256) in found.items()
    }
    if any(digests[name] != entry.sha256 for name, entry in header.tensors.items()):
        raise DeltaDamaged("A tensor of the delta does not match the checksum in its header.")
    if combined_digest(digests) != header.sha256:
        raise DeltaDamaged("The weights do not match the checksum in the delta's header.")
    # Unchanged tensors are not read: an engine would have to materialise them first.
    return Weights(tensors=_Overlaid(changed, base.tensors), digests=digests)


class _Overlaid(Mapping[str, RawTensor]):
    """Tensors, some of which override others."""

    def __init__(self, changed: Mapping[str, RawTensor], others: Mapping[str, RawTensor]) -> None:
        self._changed = changed
        self._others = others

    def __getitem__(self, name: str) -> RawTensor:
        return self._changed[name] if name in self._changed else self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)


def _difference(old: RawTensor, new: RawTensor) -> _Difference | None:
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
    return _Difference(entry=entry, parts=parts)


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


def _decoded(name: str, entry: Encoded, base: Weights, parts: Mapping[str, RawTensor]) -> RawTensor:
    tensor = base.tensors.get(name)
    if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
        raise DeltaDamaged(f"{name!r} has another type or shape than in the base.")
    try:
        values = _inflated(parts[f"{name}/values"], entry.deflated.get("values"))
        if entry.values == DENSE:
            words = _as_words(values, tensor)
        else:
            where = _inflated(parts[f"{name}/positions"], entry.deflated.get("positions"))
            positions = _positions(where, entry, tensor.words.size)
            words = empty_words(tensor.dtype, tensor.words.size)
            np.copyto(words, tensor.words)
            if entry.values == STEPS:
                words[positions] = stepped(words[positions], unpack_varints(values, entry.changed))
            else:
                words[positions] = _as_words(values, tensor)
        return RawTensor(dtype=tensor.dtype, shape=tensor.shape, words=words)
    except (ValueError, KeyError, IndexError, zlib.error) as error:
        raise DeltaDamaged(f"{name!r} in the delta cannot be read: {error}") from error


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
        raise ValueError("The positions are not those of the header.")
    return positions


def _opened(path: Path) -> tuple[DeltaHeader, dict[str, RawTensor]]:
    try:
        parts, metadata = read_tensors(path)
    except TensorFileDamaged as error:
        raise DeltaDamaged(str(error)) from error
    text = metadata.get(HEADER, "")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(HEADER_SHA256):
        raise DeltaDamaged(f"The header of {path.name} was altered, or it is no delta.")
    fields = json.loads(text)
    if fields.pop("format") != FORMAT:
        raise DeltaDamaged(f"{path.name} has another format than {FORMAT}.")
    tensors = {n: Encoded(**{**entry, "shape": tuple(entry["shape"])}) for n, entry in fields.pop("tensors").items()}
    return DeltaHeader(**fields, tensors=tensors), parts


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
        raise ValueError("A deflated stream has another size.")
    return np.frombuffer(content, dtype=np.uint8)


def _as_bytes(words: Words) -> Bytes:
    return np.ascontiguousarray(words).view(np.uint8)


def _as_words(content: Bytes, like: RawTensor) -> Words:
    return np.ascontiguousarray(content).view(like.words.dtype)
