"""The terms that all ranks of a run agree on, and the terms of each sum."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from statistics import median

SUM = "sum"
"""Codec of uncompressed tensors, of which no member may be left out."""
QUORUM_SUM = "quorum_sum"
"""The same of tensors whose late members send them again in the next round."""
CHUNK_BYTES = 1020 * 1024
"""Of every chunk except the last. A message then has just under 1 MiB; gRPC for Python is slower with smaller ones."""
MAX_SETTINGS_BYTES = 16 * 1024
MAX_RANKS = 4096
MAX_SHARDS = 4096
MAX_BUCKETS = 65_536
MAX_SUM_BYTES = 64 * 2**20
"""Of one payload of the codec `sum`; longer tensors are summed in pieces."""
BYTES_PER_ELEMENT = 8
"""Upper bound of a payload; float32 has 4, and a full sparse payload slightly more."""
HEADER_BYTES = 4096
"""Allowed in addition."""
REMEMBERED = 32
DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem with the terms: the field and its description."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """How long a sum waits for missing payloads.

    Attributes:
        quorum: Share of members whose payloads make a sum once the deadline has passed; 1 waits for all.
        min_wait_s: Shortest deadline, in seconds after the first chunk.
        max_wait_s: Longest deadline.
        straggler_timeout_s: A member that delays a sum for this long is removed.
        lease_s: A member that is silent for this long is removed.
    """

    quorum: float = 1.0
    min_wait_s: float = 0.2
    max_wait_s: float = 30.0
    straggler_timeout_s: float = 300.0
    lease_s: float = 15.0


@dataclass(slots=True, kw_only=True)
class ArrivalTimes:
    """Derives the straggler deadline from the last 32 arrivals: seconds from a sum's first chunk to complete payloads.

    Source: median absolute deviation as a robust scale (Rousseeuw and Croux, 1993). A deadline of the median plus four
    deviations passes normal spread, and a single straggler does not move it.

    Attributes:
        min_s: Shortest deadline.
        max_s: Longest deadline, also used before any arrival.
    """

    min_s: float
    max_s: float
    _offsets_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def note(self, offset_s: float) -> None:
        """Records an arrival; for a payload left out of a sum, how long the sum waited."""
        self._offsets_s.append(offset_s)

    def deadline_s(self) -> float:
        """Returns how long after the first chunk a sum waits: median + 4 MAD, within the limits."""
        if not self._offsets_s:
            return self.max_s
        middle = median(self._offsets_s)
        spread = median(abs(offset - middle) for offset in self._offsets_s)
        return min(self.max_s, max(self.min_s, middle + DEVIATIONS * spread))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of a run's ranks with one shard.

    Attributes:
        world_size: Number of members with which the first round begins.
        shard: Index of the shard, from 0.
        shard_count: Segments per bucket.
        layout_digest: Digest of the order, shapes and places of the parameters.
        codec: Registered name of the codec.
        codec_version: Version of the codec.
        settings_json: Settings of the codec.
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
        """Returns what is invalid, before anything is allocated."""
        return list(self._problems(max_elements))

    def _problems(self, max_elements: int) -> Iterator[Problem]:
        for name, value, minimum, maximum in (
            ("world_size", self.world_size, 1, MAX_RANKS),
            ("shard_count", self.shard_count, 1, MAX_SHARDS),
            ("shard", self.shard, 0, self.shard_count - 1),
            ("layout_digest", len(self.layout_digest), 1, 128),
            ("codec_settings_json", len(self.settings_json), 2, MAX_SETTINGS_BYTES),
            ("segment_sizes", len(self.segment_sizes), 0, MAX_BUCKETS),
            ("segment_sizes", sum(self.segment_sizes), 0, max_elements),
            ("segment_sizes", min(self.segment_sizes, default=0), 0, max_elements),
        ):
            if not minimum <= value <= maximum:
                yield Problem(field=name, description=f"is {value}, must be between {minimum} and {maximum}")
        patience = self.patience
        for name, seconds, longest in (
            ("min_wait_s", patience.min_wait_s, patience.max_wait_s),
            ("max_wait_s", patience.max_wait_s, patience.straggler_timeout_s),
            ("straggler_timeout_s", patience.straggler_timeout_s, 86_400.0),
            ("lease_s", patience.lease_s, 3600.0),
        ):
            if not 0 < seconds <= longest:
                yield Problem(field=name, description=f"is {seconds}, must be greater than 0 and at most {longest}")
        if not 0 < patience.quorum <= 1:
            yield Problem(field="quorum", description=f"is {patience.quorum}, must be greater than 0 and at most 1")

    def differences(self, other: Terms) -> list[Problem]:
        """Returns the differences from another rank's terms, down to single codec settings."""
        return [
            Problem(field=name, description=f"the run has {ours}, this rank {theirs}")
            for name, ours, theirs in _compared(self._shown(), other._shown())
        ]

    def _shown(self) -> dict[str, object]:
        shown: dict[str, object] = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("settings_json", "segment_sizes", "patience")
        }
        shown |= {each.name: getattr(self.patience, each.name) for each in fields(self.patience)}
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
    """The terms of one sum.

    Attributes:
        bucket: Index of the bucket, from 0.
        codec: Codec of the payloads; `sum` or `quorum_sum` for uncompressed tensors.
        codec_version: Version of the codec.
        number: Number of the round, as the codec counts.
        ratio: Bytes of float32 per byte to send.
        seed: Seed of random numbers.
        flush: Whether to send the whole residual.
        total_bytes: Size of the payload where it must be the same on all ranks (`is_plain`); otherwise 0.
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

    @property
    def is_plain(self) -> bool:
        """Whether payloads are uncompressed tensors."""
        return self.codec in (SUM, QUORUM_SUM)

    def problem(self, terms: Terms, total_bytes: int) -> str:
        """Returns what is invalid, also about the size of a payload; empty if nothing is."""
        if self.is_plain:
            return (
                "" if 0 < total_bytes <= MAX_SUM_BYTES else f"a payload of {SUM} must not exceed {MAX_SUM_BYTES} bytes"
            )
        if (self.codec, self.codec_version) != (terms.codec, terms.codec_version):
            ours = f"{terms.codec} version {terms.codec_version}"
            return f"the run's codec is {ours}, not {self.codec[:64]} version {self.codec_version}"
        if not 0 <= self.bucket < len(terms.segment_sizes):
            return f"the run has {len(terms.segment_sizes)} buckets"
        if not math.isfinite(self.ratio) or self.ratio < 1:
            return "the ratio must be finite and at least 1"
        max_bytes = terms.segment_sizes[self.bucket] * BYTES_PER_ELEMENT + HEADER_BYTES
        return "" if 0 < total_bytes <= max_bytes else f"a payload of this segment must not exceed {max_bytes} bytes"

    def differences(self, other: CallTerms) -> str:
        """Returns the differences from another rank's terms; empty if there are none."""
        found = (
            (each.name, getattr(self, each.name), getattr(other, each.name))
            for each in fields(self)
            if getattr(self, each.name) != getattr(other, each.name)
        )
        return ", ".join(f"{name} is {ours} for the other ranks and {theirs} here" for name, ours, theirs in found)
