"""What all ranks of a run agree on before they exchange anything, and what they agree on for each sum."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

SUM = "sum"
"""The codec of tensors that are summed as they are: nothing is kept back of them, so no member may be left out."""
CHUNK_BYTES = 1020 * 1024
"""Of every chunk but the last: so much that its message has just under 1 MiB; gRPC for Python is slower with smaller ones."""
MAX_SETTINGS_BYTES = 16 * 1024
MAX_RANKS = 4096
MAX_SHARDS = 4096
MAX_BUCKETS = 65_536
MAX_SUM_BYTES = 64 * 2**20
"""Of one payload of the codec `sum`; a longer tensor is summed in pieces."""
BYTES_PER_ELEMENT = 8
"""That a payload may have at most; float32 has 4, and a sparse payload that leaves nothing out a little more."""
HEADER_BYTES = 4096
"""Allowed besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with the terms: the field, and what about it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """How long a sum waits for whom.

    Attributes:
        quorum: The share of members whose payloads make a sum once the deadline has passed; 1 waits for all.
        min_wait_s: The shortest deadline for stragglers, in seconds after the first chunk.
        max_wait_s: The longest.
        straggler_timeout_s: A member that keeps a sum waiting for so long is removed.
        lease_s: So is one that is silent for so long.
    """

    quorum: float = 1.0
    min_wait_s: float = 0.2
    max_wait_s: float = 30.0
    straggler_timeout_s: float = 300.0
    lease_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all ranks of a run agree on with one shard.

    Attributes:
        world_size: Members with which the first round begins.
        shard: Which shard, from 0.
        shard_count: Segments of each bucket.
        layout_digest: Names the order, shapes and places of the parameters.
        codec: The codec's registered name.
        codec_version: Its version.
        settings_json: Its settings.
        segment_sizes: Elements of this shard's segment of each bucket.
        patience: How long a sum waits.
    """

    world_size: int
    shard: int
    shard_count: int
    layout_digest: str
    codec: str
    codec_version: int
    settings_json: str
    segment_sizes: tuple[int, ...]
    patience: StragglerPolicy = StragglerPolicy()

    def problems(self, *, max_elements: int) -> list[Problem]:
        """Lists what no run may have, before anything is allocated for it."""
        return list(self._problems(max_elements))

    def _problems(self, max_elements: int) -> Iterator[Problem]:
        for field, value, least, most in (
            ("world_size", self.world_size, 1, MAX_RANKS),
            ("shard_count", self.shard_count, 1, MAX_SHARDS),
            ("shard", self.shard, 0, self.shard_count - 1),
            ("layout_digest", len(self.layout_digest), 1, 128),
            ("codec_settings_json", len(self.settings_json), 2, MAX_SETTINGS_BYTES),
            ("segment_sizes", len(self.segment_sizes), 0, MAX_BUCKETS),
            ("segment_sizes", sum(self.segment_sizes), 0, max_elements),
            ("segment_sizes", min(self.segment_sizes, default=0), 0, max_elements),
        ):
            if not least <= value <= most:
                yield Problem(field=field, description=f"is {value}, must be between {least} and {most}")
        patience = self.patience
        for field, seconds, longest in (
            ("min_wait_s", patience.min_wait_s, patience.max_wait_s),
            ("max_wait_s", patience.max_wait_s, patience.straggler_timeout_s),
            ("straggler_timeout_s", patience.straggler_timeout_s, 86_400.0),
            ("lease_s", patience.lease_s, 3600.0),
        ):
            if not 0 < seconds <= longest:
                yield Problem(field=field, description=f"is {seconds}, must be over 0 and at most {longest}")
        if not 0 < patience.quorum <= 1:
            yield Problem(field="quorum", description=f"is {patience.quorum}, must be over 0 and at most 1")

    def differences(self, other: Terms) -> list[Problem]:
        """Lists what another rank's terms have otherwise, settings of the codec one by one."""
        return [
            Problem(field=field, description=f"the run has {ours}, this rank {theirs}")
            for field, ours, theirs in _compared(self._shown(), other._shown())
        ]

    def _shown(self) -> dict[str, object]:
        shown: dict[str, object] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("settings_json", "segment_sizes", "patience")
        }
        shown |= {field.name: getattr(self.patience, field.name) for field in fields(self.patience)}
        shown |= {f"segment_sizes[{bucket}]": size for bucket, size in enumerate(self.segment_sizes)}
        return shown | {f"codec_settings.{name}": value for name, value in _settings_of(self.settings_json).items()}


def _settings_of(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"": text}
    return found if isinstance(found, dict) else {"": text}


def _compared(ours: dict[str, object], theirs: dict[str, object]) -> Iterator[tuple[str, object, object]]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        left, right = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if left != right:
            yield name, left, right


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """What all ranks agree on for one sum.

    Attributes:
        bucket: From 0.
        codec: Whose payloads are summed; `sum` for tensors as they are.
        codec_version: Its version.
        number: The step that the codec counts by.
        ratio: Bytes of float32 for each byte that is to be sent.
        seed: Of what is random.
        flush: Whether all that was kept back is to be sent.
        total_bytes: Size of the payload, where all ranks must have the same: those of `sum`; otherwise 0.
    """

    bucket: int
    codec: str
    codec_version: int
    number: int
    ratio: float
    seed: int
    flush: bool
    total_bytes: int = 0

    @property
    def needs_all(self) -> bool:
        """Whether no member may be left out."""
        return self.codec == SUM

    def problem(self, terms: Terms, total_bytes: int) -> str:
        """Says what is wrong with it, or with the size of a payload; empty if nothing is."""
        if self.codec == SUM:
            return "" if 0 < total_bytes <= MAX_SUM_BYTES else f"a payload of {SUM} has at most {MAX_SUM_BYTES} bytes"
        if (self.codec, self.codec_version) != (terms.codec, terms.codec_version):
            ours = f"{terms.codec} version {terms.codec_version}"
            return f"the run's codec is {ours}, not {self.codec[:64]} version {self.codec_version}"
        if not 0 <= self.bucket < len(terms.segment_sizes):
            return f"the run has {len(terms.segment_sizes)} buckets"
        if not math.isfinite(self.ratio) or self.ratio < 1:
            return "the ratio must be finite and at least 1"
        most = terms.segment_sizes[self.bucket] * BYTES_PER_ELEMENT + HEADER_BYTES
        return "" if 0 < total_bytes <= most else f"a payload of this segment has at most {most} bytes"

    def differences(self, other: CallTerms) -> str:
        """Names what another rank has otherwise; empty if nothing."""
        found = (
            (field.name, getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )
        return ", ".join(f"{name} is {ours} for the others and {theirs} here" for name, ours, theirs in found)
