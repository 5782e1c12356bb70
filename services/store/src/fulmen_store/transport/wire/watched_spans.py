"""Spans of a chunk one by one, whole or as outlines: for browsers and tools that cannot read chunks."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import attempt_name
from fulmen.store.v1 import span_pb2, span_service_pb2
from fulmen.type.v1 import model_call_pb2
from fulmen_service_kit.rpc.message_sizes import ANSWER_BYTES
from fulmen_store.spans.chunks import Chunk
from fulmen_store.spans.span_filter import SpanFilter
from fulmen_store.transport.wire.spans import matching_spans, outlined

__all__ = ["watched_spans"]

# Longest text of an attribute in an outline, characters.
MAX_TEXT: Final = 256
# Spans up to this size are left as they are, bytes.
SMALL_BYTES: Final = 2048
# Attributes and events of the outline of a larger span.
MAX_ENTRIES: Final = 32
_SCALAR: Final = frozenset({"string_value", "bool_value", "int_value", "double_value"})
_OF_TOKENS: Final = (
    "prompt_token_ids", "completion_token_ids", "completion_logprobs", "completion_token_text", "completion_token_sizes",
    "routed_experts",    "request_json", "response_json",
)  # fmt: skip


def watched_spans(
    chunk: Chunk, project: str, wanted: SpanFilter | None, seen: set[tuple[int, bytes]], *, in_outline: bool
) -> tuple[list[span_service_pb2.AttemptSpan], int]:
    """Returns the matching spans of a chunk that are not in `seen`, to which they are added, and the number of those that were.

    Args:
        chunk: The chunk.
        project: Its project's name.
        wanted: The filter; None for all.
        seen: Attempts and ids of spans.
        in_outline: Whether contents of model calls are left out, and long texts of attributes cut.

    Raises:
        ChunkUnreadable: If it cannot be unpacked.
    """
    attempt = attempt_name(project, chunk.rollout_id, chunk.attempt)
    found, repeated = matching_spans(chunk, wanted, seen)
    sent = []
    for record, span in found:
        if in_outline:
            record = _outline(record, span)
        if record.ByteSize() > ANSWER_BYTES:
            record = outlined(record, span)
        sent.append(span_service_pb2.AttemptSpan(attempt=attempt, span=record))
    return sent, repeated


def _outline(record: span_pb2.SpanRecord, span: trace_pb2.Span) -> span_pb2.SpanRecord:
    if len(record.otlp_span) > SMALL_BYTES:
        short = outlined(record, span)
        short.otlp_span = _with_texts(trace_pb2.Span.FromString(short.otlp_span), span).SerializeToString()
    elif record.model_call:
        short = span_pb2.SpanRecord(otlp_span=record.otlp_span, scope=record.scope[:MAX_TEXT])
    else:
        return record
    short.model_call = _without_tokens(record.model_call)
    return short


def _with_texts(short: trace_pb2.Span, span: trace_pb2.Span) -> trace_pb2.Span:
    """Adds the status, the beginning of the first attributes that are not lists, and the names of the first
    events."""
    short.status.message = span.status.message[:MAX_TEXT]
    for pair in span.attributes[:MAX_ENTRIES]:
        if pair.value.WhichOneof("value") in _SCALAR:
            kept = short.attributes.add(key=pair.key[:MAX_TEXT], value=pair.value)
            if pair.value.string_value:
                kept.value.string_value = pair.value.string_value[:MAX_TEXT]
    for event in span.events[:MAX_ENTRIES]:
        short.events.add(time_unix_nano=event.time_unix_nano, name=event.name[:MAX_TEXT])
    short.dropped_attributes_count -= len(short.attributes)
    short.dropped_events_count -= len(short.events)
    return short


def _without_tokens(packed: bytes) -> bytes:
    if not packed:
        return b""
    try:
        call = model_call_pb2.ModelCallRecord.FromString(packed)
    except DecodeError:
        return b""
    for name in _OF_TOKENS:
        call.ClearField(name)
    return call.SerializeToString()
