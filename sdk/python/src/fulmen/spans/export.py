"""Spans as rows of a file; `fulmen.row_files` writes it.

Invariant: a span that is stored twice is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import parse_attempt_name, rollout_of
from fulmen.row_files import Column, Row
from fulmen.store.v1 import span_pb2
from fulmen.trajectories import MAX_BATCH_BYTES
from fulmen.type.v1 import model_call_pb2
from fulmen.zstd import FrameInvalid, decompress

__all__ = ["SPAN_COLUMNS", "SpanRows", "attribute_value", "unpacked"]


class SpanRows:
    """Converts chunks to rows; chunks of a rollout must be consecutive, as the store sends them.

    Attributes:
        duplicates: number of repeated spans.
        unreadable: number of chunks that could not be unpacked.
    """

    def __init__(self) -> None:
        """Initializes empty counts."""
        self.duplicates = 0
        self.unreadable = 0
        self._rollout = ""
        self._seen: set[tuple[str, bytes]] = set()

    def of(self, chunk: span_pb2.SpanChunk) -> Iterator[Row]:
        """Yields the spans of a chunk, without repeated ones."""
        rollout = rollout_of(chunk.attempt)
        if rollout != self._rollout:
            self._rollout, self._seen = rollout, set()
        try:
            batch = unpacked(chunk)
            parsed = [(record, trace_pb2.Span.FromString(record.otlp_span)) for record in batch.spans]
        except (DecodeError, FrameInvalid):
            self.unreadable += 1
            return
        for record, span in parsed:
            key = chunk.attempt, span.span_id
            if key in self._seen:
                self.duplicates += 1
                continue
            self._seen.add(key)
            yield _row(chunk.attempt, record, span)


SPAN_COLUMNS: Final = {
    "rollout": Column.TEXT,
    "attempt": Column.INT32,
    "trace_id": Column.TEXT,
    "span_id": Column.TEXT,
    "parent_span_id": Column.TEXT,
    "name": Column.TEXT,
    "kind": Column.TEXT,
    "start_time_unix_nano": Column.UINT64,
    "end_time_unix_nano": Column.UINT64,
    "status": Column.TEXT,
    "status_message": Column.TEXT,
    "scope": Column.TEXT,
    "attributes": Column.NESTED,
    "events": Column.NESTED,
    "links": Column.NESTED,
    "resource": Column.NESTED,
    "model_call": Column.NESTED,
}


def _row(attempt: str, record: span_pb2.SpanRecord, span: trace_pb2.Span) -> Row:
    name = parse_attempt_name(attempt)
    resource = resource_pb2.Resource.FromString(record.otlp_resource)
    call = model_call_pb2.ModelCallRecord.FromString(record.model_call) if record.model_call else None
    return {
        "rollout": name.rollout,
        "attempt": name.number,
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_span_id": span.parent_span_id.hex(),
        "name": span.name,
        "kind": _word(trace_pb2.Span.SpanKind.Name, span.kind, "SPAN_KIND_"),
        "start_time_unix_nano": span.start_time_unix_nano,
        "end_time_unix_nano": span.end_time_unix_nano,
        "status": _word(trace_pb2.Status.StatusCode.Name, span.status.code, "STATUS_CODE_"),
        "status_message": span.status.message,
        "scope": record.scope,
        "attributes": {pair.key: attribute_value(pair.value) for pair in span.attributes},
        "events": [
            {
                "name": event.name,
                "time_unix_nano": event.time_unix_nano,
                "attributes": {pair.key: attribute_value(pair.value) for pair in event.attributes},
            }
            for event in span.events
        ],
        "links": [{"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex()} for link in span.links],
        "resource": {pair.key: attribute_value(pair.value) for pair in resource.attributes},
        "model_call": None if call is None else MessageToDict(call, preserving_proto_field_name=True),
    }


def attribute_value(value: Any) -> Any:
    """Returns an OTLP value as JSON: lists and maps as such, bytes in hexadecimal."""
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [attribute_value(each) for each in value.array_value.values]
        case "kvlist_value":
            return {pair.key: attribute_value(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return value.bytes_value.hex()
        case kind:
            return getattr(value, kind)


def _word(name_of: Any, number: int, prefix: str) -> str:
    try:
        return str(name_of(number)).removeprefix(prefix).lower()
    except ValueError:
        return str(number)


def unpacked(chunk: span_pb2.SpanChunk) -> span_pb2.SpanBatch:
    """Returns the spans of a chunk.

    Raises:
        DecodeError: If the payload is malformed.
        FrameInvalid: If it cannot be decompressed.
    """
    payload = chunk.payload
    if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
        payload = decompress(payload, max_bytes=MAX_BATCH_BYTES)
    return span_pb2.SpanBatch.FromString(payload)
