"""Chunks of spans that tests write and read."""

from __future__ import annotations

import asyncio

import zstandard
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.ids import uuid7
from fulmen.store.v1 import span_pb2
from fulmen.store.v1 import span_service_pb2 as pb
from tests.support.store.running import LIMIT_S, Stubs

__all__ = ["append", "chunk_of", "stored"]


def chunk_of(attempt: str, count: int = 3, *, model_call: bytes = b"") -> span_pb2.SpanChunk:
    """Makes a chunk of spans with distinct ids."""
    records = [
        span_pb2.SpanRecord(
            otlp_span=trace_pb2.Span(
                name=f"span-{index}",
                span_id=uuid7().bytes[-8:],
                trace_id=uuid7().bytes,
                start_time_unix_nano=1000 + index,
            ).SerializeToString(),
            model_call=model_call,
            scope="tests",
        )
        for index in range(count)
    ]
    payload = span_pb2.SpanBatch(spans=records).SerializeToString()
    return span_pb2.SpanChunk(
        attempt=attempt,
        chunk_id=str(uuid7()),
        span_count=count,
        codec=span_pb2.SPAN_CODEC_ZSTD,
        payload=zstandard.ZstdCompressor().compress(payload),
    )


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
