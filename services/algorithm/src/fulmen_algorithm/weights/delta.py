"""Lossless deltas between two sets of weights: positions and new values of the elements whose bits changed.

Each tensor that changed is encoded by itself; see `tensor_delta`.

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

from fulmen_algorithm.weights.tensor_delta import KINDS, Difference, Encoded, difference, restored
from fulmen_algorithm.weights.tensor_files import (
    RawTensor,
    TensorFileDamaged,
    Weights,
    combined_digest,
    layout,
    read_tensors,
    write_tensors,
)

DELTA_FILE = "delta.safetensors"
FORMAT = 1
HEADER, HEADER_SHA256 = "fulmen.delta", "fulmen.delta.sha256"
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


def _pool() -> ThreadPoolExecutor:
    # Checksums, compression and comparison of large arrays run without the interpreter's lock.
    return ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="delta")


class DeltaWriter:
    """Encodes a delta tensor by tensor, several at a time; encoded tensors are in memory until they are written.

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
        self._begun: deque[tuple[str, Future[Difference | None]]] = deque()

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
        self._begun.append((name, self._pool.submit(difference, old, new)))
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
        raise TensorsDiffer("The names, types or shapes of the weights differ from their base.")
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


def _decoded(name: str, entry: Encoded, base: Weights, parts: Mapping[str, RawTensor]) -> RawTensor:
    tensor = base.tensors.get(name)
    if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
        raise DeltaDamaged(f"{name!r} has a different type or shape than in the base.")
    own = {kind: parts[f"{name}/{kind}"] for kind in KINDS if f"{name}/{kind}" in parts}
    try:
        return restored(tensor, entry, own)
    except (ValueError, KeyError, IndexError, zlib.error) as error:
        raise DeltaDamaged(f"{name!r} in the delta cannot be read: {error}") from error


def _opened(path: Path) -> tuple[DeltaHeader, dict[str, RawTensor]]:
    try:
        parts, metadata = read_tensors(path)
    except TensorFileDamaged as error:
        raise DeltaDamaged(str(error)) from error
    text = metadata.get(HEADER, "")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(HEADER_SHA256):
        raise DeltaDamaged(f"The header of {path.name} was altered, or it is not a delta.")
    fields = json.loads(text)
    if fields.pop("format") != FORMAT:
        raise DeltaDamaged(f"{path.name} has another format than {FORMAT}.")
    tensors = {n: Encoded(**{**entry, "shape": tuple(entry["shape"])}) for n, entry in fields.pop("tensors").items()}
    return DeltaHeader(**fields, tensors=tensors), parts
