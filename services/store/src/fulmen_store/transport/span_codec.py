"""Spans between OTLP, chunks and the domain."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast
from uuid import UUID

import zstandard
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid
from fulmen.ids import AttemptName, attempt_name, parse_attempt_name
from fulmen.store.v1 import span_pb2
from fulmen_store.domain.spans import MAX_PAYLOAD_BYTES, Chunk, chunk_problem

__all__ = ["DecodedSpan", "chunk_message", "chunks_of_export", "decode_spans", "read_chunk", "model_call_problem"]

MAX_UNPACKED_BYTES: Final = 64 * 1024 * 1024
SPANS_PER_CHUNK: Final = 512
# Uncompressed, so that even incompressible spans stay below the limit of a payload.
BYTES_PER_CHUNK: Final = MAX_PAYLOAD_BYTES // 2
ZSTD_LEVEL: Final = 3
ROLLOUT_KEY: Final = "fulmen.rollout"
ATTEMPT_KEY: Final = "fulmen.attempt"
# The year 2255: nanoseconds since 1970 still fit into 63 bits.
MAX_SECONDS: Final = 9_000_000_000

_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedSpan:
    """A span that was unpacked for a listing, and its place in the order."""

    start_ns: int
    attempt: AttemptName
    span_id: bytes
    record: span_pb2.SpanRecord

    @property
    def key(self) -> bytes:
        """Its place as 20 bytes that sort like it."""
        return self.start_ns.to_bytes(8) + self.attempt.number.to_bytes(4) + self.span_id[:8].rjust(8, b"\0")


def read_chunk(message: span_pb2.SpanChunk) -> Chunk | str:
    """Reads a chunk; returns what is wrong with it if it is malformed."""
    try:
        attempt = parse_attempt_name(message.attempt)
        chunk_id = UUID(message.chunk_id)
    except ArgumentInvalid:
        return "attempt is not of the form rollouts/{uuid}/attempts/{n}"
    except ValueError:
        return "chunk_id is not a UUID"
    problem = chunk_problem(span_count=message.span_count, codec=message.codec, payload_size=len(message.payload))
    if problem:
        return problem
    if not all(0 <= field.seconds <= MAX_SECONDS for field in (message.start_time, message.end_time)):
        return "start_time or end_time is out of range"
    return Chunk(
        rollout_id=attempt.rollout_id,
        attempt=attempt.number,
        chunk_id=chunk_id,
        span_count=message.span_count,
        codec=message.codec,
        start_ns=message.start_time.seconds * _NS + message.start_time.nanos,
        end_ns=message.end_time.seconds * _NS + message.end_time.nanos,
        payload=message.payload,
    )


def chunk_message(chunk: Chunk) -> span_pb2.SpanChunk:
    """Writes a stored chunk, its payload untouched."""
    return span_pb2.SpanChunk(
        attempt=attempt_name(chunk.rollout_id, chunk.attempt),
        chunk_id=str(chunk.chunk_id),
        span_count=chunk.span_count,
        codec=cast("span_pb2.SpanCodec", chunk.codec),
        payload=chunk.payload,
        start_time=Timestamp(seconds=chunk.start_ns // _NS, nanos=chunk.start_ns % _NS),
        end_time=Timestamp(seconds=chunk.end_ns // _NS, nanos=chunk.end_ns % _NS),
    )


def model_call_problem(chunk: Chunk) -> str:
    """Returns why a writer without a service token may not write a chunk; empty if it may."""
    try:
        batch = _unpack(chunk)
    except (zstandard.ZstdError, DecodeError):
        return "payload cannot be decoded"
    if any(record.model_call for record in batch.spans):
        return "model calls are recorded by services only"
    if len(batch.spans) != chunk.span_count:
        return f"span_count is {chunk.span_count}, but there are {len(batch.spans)} spans"
    return ""


def decode_spans(chunks: Iterable[Chunk]) -> list[DecodedSpan]:
    """Unpacks chunks into spans in order of start time, each once."""
    found: dict[tuple[int, bytes], DecodedSpan] = {}
    for chunk in chunks:
        attempt = AttemptName(rollout_id=chunk.rollout_id, number=chunk.attempt)
        for record in _unpack(chunk).spans:
            span = trace_pb2.Span.FromString(record.otlp_span)
            found.setdefault(
                (chunk.attempt, span.span_id),
                DecodedSpan(start_ns=span.start_time_unix_nano, attempt=attempt, span_id=span.span_id, record=record),
            )
    return sorted(found.values(), key=lambda span: span.key)


def chunks_of_export(
    request: trace_service_pb2.ExportTraceServiceRequest, *, own: AttemptName | None
) -> tuple[list[Chunk], int]:
    """Packs an OTLP export into chunks.

    Args:
        request: what an OpenTelemetry SDK or collector sent.
        own: the attempt that every span belongs to; None: as the spans' or resources' attributes say.

    Returns:
        The chunks, and how many spans name no attempt.
    """
    per_attempt: dict[AttemptName, list[tuple[trace_pb2.Span, span_pb2.SpanRecord]]] = {}
    homeless = 0
    for resource_spans in request.resource_spans:
        resource = resource_spans.resource.SerializeToString(deterministic=True)
        fallback = own or _attempt_of(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                attempt = own or _attempt_of(span.attributes) or fallback
                if attempt is None:
                    homeless += 1
                    continue
                record = span_pb2.SpanRecord(
                    otlp_span=span.SerializeToString(deterministic=True),
                    scope=scope_spans.scope.name,
                    otlp_resource=resource,
                )
                per_attempt.setdefault(attempt, []).append((span, record))
    chunks = [_pack(attempt, part) for attempt, spans in per_attempt.items() for part in _parts(spans)]
    return chunks, homeless


def _parts(
    spans: Sequence[tuple[trace_pb2.Span, span_pb2.SpanRecord]],
) -> Iterator[list[tuple[trace_pb2.Span, span_pb2.SpanRecord]]]:
    part: list[tuple[trace_pb2.Span, span_pb2.SpanRecord]] = []
    size_bytes = 0
    for span, record in spans:
        size_bytes += record.ByteSize()
        if part and (len(part) >= SPANS_PER_CHUNK or size_bytes > BYTES_PER_CHUNK):
            yield part
            part, size_bytes = [], record.ByteSize()
        part.append((span, record))
    if part:
        yield part


def _pack(attempt: AttemptName, spans: Sequence[tuple[trace_pb2.Span, span_pb2.SpanRecord]]) -> Chunk:
    raw = span_pb2.SpanBatch(spans=[record for _, record in spans]).SerializeToString(deterministic=True)
    start_ns = min(span.start_time_unix_nano for span, _ in spans)
    # An exporter repeats an export whose answer was lost: the same spans make the same id.
    digest = int.from_bytes(hashlib.sha256(str(attempt).encode() + raw).digest()[:10])
    chunk_id = UUID(int=((start_ns // 1_000_000) & (2**48 - 1)) << 80 | digest)
    return Chunk(
        rollout_id=attempt.rollout_id,
        attempt=attempt.number,
        chunk_id=chunk_id,
        span_count=len(spans),
        codec=span_pb2.SPAN_CODEC_ZSTD,
        start_ns=start_ns % 2**63,
        end_ns=max(span.end_time_unix_nano for span, _ in spans) % 2**63,
        payload=zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw),
    )


def _unpack(chunk: Chunk) -> span_pb2.SpanBatch:
    payload = chunk.payload
    if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= MAX_UNPACKED_BYTES:
            raise zstandard.ZstdError("the frame is too large or does not tell its size")
        payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=MAX_UNPACKED_BYTES)
    return span_pb2.SpanBatch.FromString(payload)


def _attempt_of(attributes: Iterable[common_pb2.KeyValue]) -> AttemptName | None:
    rollout, number = "", 0
    for attribute in attributes:
        if attribute.key == ROLLOUT_KEY:
            rollout = attribute.value.string_value
        elif attribute.key == ATTEMPT_KEY:
            number = attribute.value.int_value
    try:
        return parse_attempt_name(f"{rollout}/attempts/{number}") if rollout else None
    except ArgumentInvalid:
        return None
