"""How the gradients of a model lie in buckets, the same on every rank.

What is worth compressing lies flat in buckets of whole parameters, in the order of the model; the rest (vectors, small
parameters, those that a setting names) is summed as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from fulmen_exchange.codecs.codec import BLOCK
from fulmen_exchange.settings import CodecSettings

BUCKET_BYTES = 25 * 2**20
"""So large that a bucket outweighs what every message costs, and no larger: new memory costs more than arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpan:
    """Where a parameter lies: its name, its shape as rows and columns, and where it begins in its bucket."""

    name: str
    rows: int
    columns: int
    begin: int

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.begin + self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which parameters lie where.

    Attributes:
        buckets: The places in each bucket.
        dense: Names of the parameters that are summed as they are.
        shards: Segments of each bucket.
    """

    buckets: tuple[tuple[ParameterSpan, ...], ...]
    dense: tuple[str, ...]
    shards: int

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, nn.Parameter]], settings: CodecSettings, *, shards: int) -> Layout:
        """Lays the parameters that train out."""
        buckets: list[list[ParameterSpan]] = []
        dense: list[str] = []
        end = 0
        for name, parameter in parameters:
            if not parameter.requires_grad:
                continue
            size = parameter.numel()
            named = any(fnmatchcase(name, pattern) for pattern in settings.dense)
            if parameter.ndim < 2 or size < settings.dense_below or named:
                dense.append(name)
                continue
            if not buckets or (end + size) * 4 > BUCKET_BYTES:
                buckets.append([])
                end = 0
            rows = parameter.shape[0]
            buckets[-1].append(ParameterSpan(name=name, rows=rows, columns=size // rows, begin=end))
            end += size
        return cls(buckets=tuple(map(tuple, buckets)), dense=tuple(dense), shards=shards)

    @property
    def digest(self) -> str:
        """Names the layout: ranks with different ones cannot exchange anything."""
        text = repr([[(p.name, p.rows, p.columns, p.begin) for p in places] for places in self.buckets])
        return hashlib.sha256(f"{text}{self.dense}{self.shards}".encode()).hexdigest()[:16]

    def size_of(self, bucket: int) -> int:
        """Elements of a bucket."""
        return self.buckets[bucket][-1].end

    def offsets_of(self, bucket: int) -> list[int]:
        """Where the segments of a bucket begin, and its end: multiples of the block, about as long as each other."""
        size = self.size_of(bucket)
        blocks = -(-size // BLOCK)
        return [min(size, (blocks * shard // self.shards) * BLOCK) for shard in range(self.shards)] + [size]


def fill(
    flat: Tensor,
    places: Sequence[ParameterSpan],
    gradients: Mapping[str, Tensor],
    put: Callable[[Tensor, int, Tensor], None] | None = None,
) -> None:
    """Puts gradients in their places in a flat tensor; a parameter without one counts as zeros.

    Args:
        flat: float32; all of it that has a place is written to.
        places: They.
        gradients: By name of the parameter.
        put: Is given each gradient, flat, with where it begins and what to write to, which may be the gradient; copies
            unless given.
    """
    for place in places:
        out = flat[place.begin : place.end]
        gradient = gradients.get(place.name)
        if gradient is None:
            out.zero_()
            if put is not None:
                put(out, place.begin, out)
        elif put is None:
            out.copy_(gradient.flatten())
        else:
            put(gradient.flatten(), place.begin, out)
