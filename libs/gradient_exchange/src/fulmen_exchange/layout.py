"""The layout of gradients in buckets, the same on every rank.

Parameters worth compressing are flattened into buckets, whole and in the order of the model. The rest (vectors, small
parameters and those that a setting names) is summed uncompressed.
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
"""Large enough to outweigh the cost of a message, small enough that allocation stays cheaper than arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpan:
    """Place of a parameter: name, shape as rows and columns, and its first element in the bucket."""

    name: str
    rows: int
    columns: int
    begin: int

    @property
    def end(self) -> int:
        """First element after the parameter."""
        return self.begin + self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The places of parameters.

    Attributes:
        buckets: Spans of the parameters in each bucket.
        dense: Names of the parameters summed uncompressed.
        shards: Segments per bucket.
    """

    buckets: tuple[tuple[ParameterSpan, ...], ...]
    dense: tuple[str, ...]
    shards: int

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, nn.Parameter]], settings: CodecSettings, *, shards: int) -> Layout:
        """Lays out the trainable parameters."""
        buckets: list[list[ParameterSpan]] = []
        dense: list[str] = []
        end = 0
        for name, parameter in parameters:
            if not parameter.requires_grad:
                continue
            size = parameter.numel()
            named = any(fnmatchcase(name, pattern) for pattern in settings.dense)
            if not settings.is_private and (parameter.ndim < 2 or size < settings.dense_below or named):
                dense.append(name)
                continue
            if not buckets or (end + size) * 4 > BUCKET_BYTES:
                buckets.append([])
                end = 0
            rows = parameter.shape[0] if parameter.ndim else 1
            buckets[-1].append(ParameterSpan(name=name, rows=rows, columns=size // rows, begin=end))
            end += size
        return cls(buckets=tuple(map(tuple, buckets)), dense=tuple(dense), shards=shards)

    @property
    def digest(self) -> str:
        """Digest of the layout; ranks with different digests cannot exchange gradients."""
        text = repr([[(p.name, p.rows, p.columns, p.begin) for p in places] for places in self.buckets])
        return hashlib.sha256(f"{text}{self.dense}{self.shards}".encode()).hexdigest()[:16]

    def size_of(self, bucket: int) -> int:
        """Returns the elements of a bucket."""
        return self.buckets[bucket][-1].end

    def offsets_of(self, bucket: int) -> list[int]:
        """Returns where the segments of a bucket begin, and its end: multiples of the block, about equally long."""
        size = self.size_of(bucket)
        blocks = -(-size // BLOCK)
        return [min(size, (blocks * shard // self.shards) * BLOCK) for shard in range(self.shards)] + [size]


def fill(
    flat: Tensor,
    places: Sequence[ParameterSpan],
    gradients: Mapping[str, Tensor],
    put: Callable[[Tensor, int, Tensor], None] | None = None,
) -> None:
    """Copies gradients into a flat tensor; a parameter without one counts as zeros.

    Args:
        flat: float32; every span is overwritten.
        places: Spans of the parameters.
        gradients: Gradients by parameter name.
        put: Writes a flat gradient, given its first element and the output (which may be the gradient); copies by default.
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
