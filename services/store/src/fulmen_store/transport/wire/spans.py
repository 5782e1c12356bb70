"""Decoding, listing and filtering of span chunks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from fulmen_service_kit.rpc.message_sizes import ANSWER_BYTES
from fulmen_store.malformed import malformed_request
from fulmen_store.spans.chunks import CODEC_ZSTD, MAX_PAYLOAD_BYTES, Chunk, NewChunk, chunk_problem, compress
from fulmen_store.spans.span_filter import AttributeValue, SpanFacts, SpanFilter
from fulmen_store.transport.otlp.codec import names_another

__all__ = [
    "ChunkUnreadable",
    "ListedSpan",
    "Listing",
    "chunk_message",
    "content_problem",
    "filtered_chunks",
    "outlined",
    "read_chunk",
    "read_filter",
    "matching_spans",
]

MAX_UNPACKED_BYTES: Final = 64 * 1024 * 1024
# The year 2255; nanoseconds since 1970 still fit into 63 bits.
MAX_SECONDS: Final = 9_000_000_000
MAX_NAMES: Final = 32
MAX_ATTRIBUTES: Final = 16
MAX_IDS: Final = 64
MAX_NAME: Final = 1024
ID_BYTES: Final = 16
# What a span takes in a list besides its record.
NAME_BYTES: Final = 160

_NS: Final = 1_000_000_000


class ChunkUnreadable(Exception):
    """A chunk's payload does not match its codec; only a broken writer causes this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSpan:
    """A span unpacked for a listing, with a sort key of 20 bytes."""

    key: bytes
    attempt: AttemptName
    record: span_pb2.SpanRecord
    size_bytes: int

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
            size_bytes = record.ByteSize() + NAME_BYTES
            if size_bytes > ANSWER_BYTES:
                record = outlined(record, span)
                size_bytes = record.ByteSize() + NAME_BYTES
            self._hold(ListedSpan(key=key, attempt=attempt, record=record, size_bytes=size_bytes))

    def _hold(self, listed: ListedSpan) -> None:
        heapq.heappush(self._heap, listed)
        self._size_bytes += listed.size_bytes
        if len(self._heap) > self._limit:
            self._size_bytes -= heapq.heappop(self._heap).size_bytes
        while self._size_bytes > self._max_bytes and len(self._heap) > 1:
            self._size_bytes -= heapq.heappop(self._heap).size_bytes
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
        return "a span names an attempt other than the key's"
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
        ("span_ids", len(message.span_ids), MAX_IDS),
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
        span_ids=frozenset(message.span_ids),
    )
    return None if wanted == SpanFilter() else wanted


def filtered_chunks(
    chunk: Chunk, project: str, wanted: SpanFilter, seen: set[tuple[int, bytes]]
) -> tuple[list[span_pb2.SpanChunk], int]:
    """Repacks the matching spans of a chunk; drops those in `seen` and adds the others to it.

    Returns:
        Chunks of the same id, one unless they would be larger than what was stored may be, and the number of dropped
        duplicates.

    Raises:
        ChunkUnreadable: If it cannot be unpacked.
    """
    found, duplicates = matching_spans(chunk, wanted, seen)
    records = [record for record, _ in found]
    return list(_repacked(chunk, project, records)) if records else [], duplicates


def matching_spans(
    chunk: Chunk, wanted: SpanFilter | None, seen: set[tuple[int, bytes]]
) -> tuple[list[tuple[span_pb2.SpanRecord, trace_pb2.Span]], int]:
    """Returns the matching spans of a chunk, without those in `seen`, to which the others are added, and how many were in it.

    Raises:
        ChunkUnreadable: If it cannot be unpacked.
    """
    found, duplicates = [], 0
    for record, span in _spans(chunk):
        name = chunk.attempt, span.span_id
        if name in seen:
            duplicates += 1
            continue
        seen.add(name)
        if _matches(wanted, record, span):
            found.append((record, span))
    return found, duplicates


def _repacked(chunk: Chunk, project: str, records: list[span_pb2.SpanRecord]) -> Iterator[span_pb2.SpanChunk]:
    payload = compress(span_pb2.SpanBatch(spans=records).SerializeToString())
    if len(payload) > MAX_PAYLOAD_BYTES and len(records) == 1:
        (record,) = records
        records = [outlined(record, trace_pb2.Span.FromString(record.otlp_span))]
        payload = compress(span_pb2.SpanBatch(spans=records).SerializeToString())
    elif len(payload) > MAX_PAYLOAD_BYTES:
        middle = len(records) // 2
        yield from _repacked(chunk, project, records[:middle])
        yield from _repacked(chunk, project, records[middle:])
        return
    message = chunk_message(replace(chunk, payload=payload, codec=CODEC_ZSTD), project)
    message.span_count = len(records)
    yield message


def outlined(record: span_pb2.SpanRecord, span: trace_pb2.Span) -> span_pb2.SpanRecord:
    """Returns a span that is too large for a message without what makes it large."""
    outline = trace_pb2.Span(
        trace_id=span.trace_id[:ID_BYTES],
        span_id=span.span_id[:ID_BYTES],
        parent_span_id=span.parent_span_id[:ID_BYTES],
        name=span.name[:MAX_NAME],
        kind=span.kind,
        start_time_unix_nano=span.start_time_unix_nano,
        end_time_unix_nano=span.end_time_unix_nano,
        dropped_attributes_count=span.dropped_attributes_count + len(span.attributes),
        dropped_events_count=span.dropped_events_count + len(span.events),
        dropped_links_count=span.dropped_links_count + len(span.links),
    )
    outline.status.code = span.status.code
    return span_pb2.SpanRecord(otlp_span=outline.SerializeToString(), scope=record.scope[:MAX_NAME])


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
            span_id=span.span_id,
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
