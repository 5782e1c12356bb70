"""Chunks of spans that tests write and read."""

from __future__ import annotations

import asyncio
from typing import Any

import zstandard
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import uuid7
from fulmen.store.v1 import span_pb2
from fulmen.store.v1 import span_service_pb2 as pb
from tests.support.sdk.trajectory_cases import attribute
from tests.support.store.running import LIMIT_S, Stubs

__all__ = ["append", "chunk_of", "packed", "span", "stored"]

SECOND = 1_000_000_000


def span(name: str, *, start: float = 1, seconds: float = 0.0, error: bool = False, **attributes: Any) -> Any:
    """Makes a span; underscores in names of attributes become dots."""
    return trace_pb2.Span(
        name=name,
        span_id=uuid7().bytes[-8:],
        trace_id=uuid7().bytes,
        start_time_unix_nano=round(start * SECOND),
        end_time_unix_nano=round((start + seconds) * SECOND),
        attributes=[attribute(key.replace("_", "."), value) for key, value in attributes.items()],
        status=trace_pb2.Status(
            code=trace_pb2.Status.STATUS_CODE_ERROR if error else trace_pb2.Status.STATUS_CODE_UNSET
        ),
    )


def packed(attempt: str, *spans: Any, model_call: bytes = b"") -> span_pb2.SpanChunk:
    """Makes a chunk of spans."""
    records = [
        span_pb2.SpanRecord(otlp_span=each.SerializeToString(), scope="tests", model_call=model_call) for each in spans
    ]
    return span_pb2.SpanChunk(
        attempt=attempt,
        chunk_id=str(uuid7()),
        span_count=len(records),
        codec=span_pb2.SPAN_CODEC_ZSTD,
        payload=zstandard.ZstdCompressor().compress(span_pb2.SpanBatch(spans=records).SerializeToString()),
    )


def chunk_of(attempt: str, count: int = 3, *, model_call: bytes = b"") -> span_pb2.SpanChunk:
    """Makes a chunk of so many spans, one after the other."""
    return packed(attempt, *(span(f"span-{index}", start=1 + index) for index in range(count)), model_call=model_call)


async def append(stubs: Stubs, *chunks: span_pb2.SpanChunk) -> pb.AppendSpansResponse:
    """Appends chunks in one message."""
    stream = stubs.spans.AppendSpans()
    await stream.write(pb.AppendSpansRequest(chunks=chunks))
    async with asyncio.timeout(LIMIT_S):
        response: pb.AppendSpansResponse = await stream.read()
    await stream.done_writing()
    return response


async def stored(stubs: Stubs, *parents: str) -> list[span_pb2.SpanChunk]:
    """Reads the chunks of rollouts."""
    stream = stubs.spans.StreamSpans(pb.StreamSpansRequest(parents=parents))
    return [chunk async for message in stream for chunk in message.chunks]
