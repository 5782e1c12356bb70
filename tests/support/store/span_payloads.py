"""Payloads of chunks that tests make."""

from __future__ import annotations

from typing import Any

import zstandard
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import uuid7
from fulmen.store.v1 import span_pb2

__all__ = ["packed", "span"]

SECOND = 1_000_000_000


def span(name: str, *, start: float = 1, seconds: float = 0.0, error: bool = False, **attributes: Any) -> Any:
    """Makes a span; underscores in names of attributes become dots."""
    kinds = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
    return trace_pb2.Span(
        name=name,
        span_id=uuid7().bytes[-8:],
        trace_id=uuid7().bytes,
        start_time_unix_nano=round(start * SECOND),
        end_time_unix_nano=round((start + seconds) * SECOND),
        attributes=[
            {"key": key.replace("_", "."), "value": {kinds[type(value)]: value}} for key, value in attributes.items()
        ],
        status={"code": trace_pb2.Status.STATUS_CODE_ERROR if error else trace_pb2.Status.STATUS_CODE_UNSET},
    )


def packed(attempt: str, *spans: Any, model_calls: bool = False, chunk_id: str = "") -> span_pb2.SpanChunk:
    """Makes a chunk of spans."""
    records = [
        span_pb2.SpanRecord(otlp_span=each.SerializeToString(), scope="tests", model_call=b"x" if model_calls else b"")
        for each in spans
    ]
    return span_pb2.SpanChunk(
        attempt=attempt,
        chunk_id=chunk_id or str(uuid7()),
        span_count=len(records),
        codec=span_pb2.SPAN_CODEC_ZSTD,
        payload=zstandard.ZstdCompressor().compress(span_pb2.SpanBatch(spans=records).SerializeToString()),
    )
