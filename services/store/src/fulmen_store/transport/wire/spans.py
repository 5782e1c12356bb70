"""Decoding, listing and filtering of span chunks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast
from uuid import UUID

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import AttemptName, attempt_name, parse_attempt_name
from fulmen.store.v1 import span_pb2, span_service_pb2
from fulmen.zstd import FrameInvalid, decompress
from fulmen_store.malformed import malformed_request
from fulmen_store.spans.chunks import Chunk, NewChunk, chunk_problem, compress
from fulmen_store.spans.span_filter import AttributeValue, SpanFacts, SpanFilter
from fulmen_store.transport.otlp.codec import names_another

__all__ = [
    "ChunkUnreadable",
    "ListedSpan",
    "Listing",
    "chunk_message",
    "content_problem",
    "filtered_chunk",
    "read_chunk",
    "read_filter",
]

MAX_UNPACKED_BYTES: Final = 64 * 1024 * 1024
# The year 2255; nanoseconds since 1970 still fit into 63 bits.
MAX_SECONDS: Final = 9_000_000_000
MAX_NAMES: Final = 32
MAX_ATTRIBUTES: Final = 16

_NS: Final = 1_000_000_000


class ChunkUnreadable(Exception):
    """A chunk's payload does not match its codec; only a broken writer causes this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSpan:
    """A span unpacked for a listing, with a sort key of 20 bytes."""

    key: bytes
    attempt: AttemptName
    record: span_pb2.SpanRecord

    def __lt__(self, other: ListedSpan) -> bool:
        # Reversed: heapq keeps the smallest on top, but the largest is to be evicted.
        return self.key > other.key


class Listing:
    """The first spans of one rollout after a position, by start time, without duplicates.

    Holds at most `limit` spans of about `max_bytes` in total, but at least one span, and the ids of the others, for any
    number of chunks.

    Attributes:
        duplicates: Number of repeated spans.
        is_cut: Whether spans were omitted because of their size.
    """

    def __init__(
        self, project: str, *, after: bytes | None, limit: int, max_bytes: int, wanted: SpanFilter | None
    ) -> None:
        self._project = project
        self._after = after
        self._limit = limit
        self._max_bytes = max_bytes
        self._wanted = wanted
        self._heap: list[ListedSpan] = []
        self._size_bytes = 0
        self._seen: set[tuple[int, bytes]] = set()
        self.duplicates = 0
        self.is_cut = False

    def add(self, chunk: Chunk) -> None:
        """Adds the spans of a chunk; chunks must be added in id order.

        Raises:
            ChunkUnreadable: If it cannot be unpacked.
        """
        attempt = AttemptName(project=self._project, rollout_id=chunk.rollout_id, number=chunk.attempt)
        for record, span in _spans(chunk):
            name = chunk.attempt, span.span_id
            if name in self._seen:
                self.duplicates += 1
                continue
            self._seen.add(name)
            key = span.start_time_unix_nano.to_bytes(8) + attempt.number.to_bytes(4) + span.span_id[:8].rjust(8, b"\0")
            if (self._after is not None and key <= self._after) or not _matches(self._wanted, record, span):
                continue
            self._hold(ListedSpan(key=key, attempt=attempt, record=record))

    def _hold(self, listed: ListedSpan) -> None:
        heapq.heappush(self._heap, listed)
        self._size_bytes += listed.record.ByteSize()
        if len(self._heap) > self._limit:
            self._size_bytes -= heapq.heappop(self._heap).record.ByteSize()
        while self._size_bytes > self._max_bytes and len(self._heap) > 1:
            self._size_bytes -= heapq.heappop(self._heap).record.ByteSize()
            self.is_cut = True

    def spans(self) -> list[ListedSpan]:
        """Returns the spans of the page, in order."""
        return sorted(self._heap, key=lambda listed: listed.key)


def read_chunk(message: span_pb2.SpanChunk) -> NewChunk | str:
    """Decodes a chunk; returns a description of the problem if it is malformed."""
    try:
        attempt = parse_attempt_name(message.attempt)
        chunk_id = UUID(message.chunk_id)
    except ArgumentInvalid:
        return "attempt is not of the form projects/{project}/rollouts/{uuid}/attempts/{n}"
    except ValueError:
        return "chunk_id is not a UUID"
    payload = message.payload
    problem = chunk_problem(span_count=message.span_count, codec=message.codec, payload_size=len(payload))
    if problem:
        return problem
    times = (message.start_time, message.end_time)
    if not all(0 <= each.seconds <= MAX_SECONDS and 0 <= each.nanos < _NS for each in times):
        return "start_time or end_time is out of range"
    chunk = Chunk(
        rollout_id=attempt.rollout_id,
        attempt=attempt.number,
        chunk_id=chunk_id,
        span_count=message.span_count,
        codec=message.codec,
        start_ns=_nanoseconds(message.start_time),
        end_ns=_nanoseconds(message.end_time),
        payload=payload,
    )
    return NewChunk(chunk=chunk, project=attempt.project)


def chunk_message(chunk: Chunk, project: str) -> span_pb2.SpanChunk:
    """Encodes a stored chunk; the payload is unchanged."""
    return span_pb2.SpanChunk(
        attempt=attempt_name(project, chunk.rollout_id, chunk.attempt),
        chunk_id=str(chunk.chunk_id),
        span_count=chunk.span_count,
        codec=cast("span_pb2.SpanCodec", chunk.codec),
        payload=chunk.payload,
        start_time=Timestamp(seconds=chunk.start_ns // _NS, nanos=chunk.start_ns % _NS),
        end_time=Timestamp(seconds=chunk.end_ns // _NS, nanos=chunk.end_ns % _NS),
    )


def content_problem(chunk: Chunk, *, own: AttemptName | None) -> str:
    """Returns the reason why a writer without a service token may not write a chunk; empty if it may.

    Args:
        chunk: The chunk.
        own: Attempt of the writer's key; None for other writers.
    """
    try:
        records = [record for record, _ in _spans(chunk)]
    except ChunkUnreadable:
        return "payload cannot be decoded"
    if any(record.model_call for record in records):
        return "only services may record model calls"
    if own is not None and any(names_another(record, own) for record in records):
        return "a span names another attempt than that of the key"
    if len(records) != chunk.span_count:
        return f"span_count is {chunk.span_count}, but there are {len(records)} spans"
    return ""


def read_filter(message: span_service_pb2.SpanFilter) -> SpanFilter | None:
    """Decodes a filter; None if it selects everything.

    Raises:
        ArgumentInvalid: If it has too many conditions or times out of range.
    """
    violations = []
    for name, count, maximum in (
        ("names", len(message.names), MAX_NAMES),
        ("attributes", len(message.attributes), MAX_ATTRIBUTES),
    ):
        if count > maximum:
            violations.append(
                Violation(field=f"filter.{name}", description=f"has {count} entries, allowed are 0 to {maximum}")
            )
    times: dict[str, int | None] = {}
    for name in ("min_end_time", "max_start_time", "min_duration"):
        value = getattr(message, name)
        times[name] = _nanoseconds(value) if message.HasField(name) else None
        if not 0 <= value.seconds <= MAX_SECONDS:
            violations.append(Violation(field=f"filter.{name}", description="is out of range"))
    if violations:
        raise malformed_request(violations)
    wanted = SpanFilter(
        names=frozenset(message.names),
        name_prefix=message.name_prefix,
        attributes=dict(message.attributes),
        end_min_ns=times["min_end_time"],
        start_max_ns=times["max_start_time"],
        duration_min_ns=times["min_duration"],
        errors_only=message.errors_only,
        model_calls_only=message.model_calls_only,
    )
    return None if wanted == SpanFilter() else wanted


def filtered_chunk(
    chunk: Chunk, project: str, wanted: SpanFilter, seen: set[tuple[int, bytes]]
) -> tuple[span_pb2.SpanChunk | None, int]:
    """Repacks the matching spans of a chunk; drops those in `seen` and adds the others to it.

    Returns:
        The chunk, None if no span is left, and the number of dropped duplicates.

    Raises:
        ChunkUnreadable: If it cannot be unpacked.
    """
    records, duplicates = [], 0
    for record, span in _spans(chunk):
        name = chunk.attempt, span.span_id
        if name in seen:
            duplicates += 1
            continue
        seen.add(name)
        if _matches(wanted, record, span):
            records.append(record)
    if not records:
        return None, duplicates
    message = chunk_message(chunk, project)
    message.span_count = len(records)
    message.codec = span_pb2.SPAN_CODEC_ZSTD
    message.payload = compress(span_pb2.SpanBatch(spans=records).SerializeToString())
    return message, duplicates


def _nanoseconds(message: Timestamp) -> int:
    return message.seconds * _NS + message.nanos


def _spans(chunk: Chunk) -> Iterable[tuple[span_pb2.SpanRecord, trace_pb2.Span]]:
    for record in _unpack(chunk).spans:
        try:
            yield record, trace_pb2.Span.FromString(record.otlp_span)
        except DecodeError as error:
            raise ChunkUnreadable from error


def _unpack(chunk: Chunk) -> span_pb2.SpanBatch:
    payload = chunk.payload
    try:
        if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
            payload = decompress(payload, max_bytes=MAX_UNPACKED_BYTES)
        return span_pb2.SpanBatch.FromString(payload)
    except (FrameInvalid, DecodeError) as error:
        raise ChunkUnreadable from error


def _matches(wanted: SpanFilter | None, record: span_pb2.SpanRecord, span: trace_pb2.Span) -> bool:
    if wanted is None:
        return True
    return wanted.matches(
        SpanFacts(
            name=span.name,
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
            is_model_call=bool(record.model_call),
            attributes=lambda: _attributes(span.attributes),
        )
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> Mapping[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind in ("string_value", "bool_value", "int_value", "double_value"):
            found[pair.key] = getattr(pair.value, kind)
    return found
