"""Ingest of spans: packed chunks, and OTLP as any OpenTelemetry SDK sends it."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from functools import cache, partial

import asyncpg
import zstandard
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from benchmarks.store.stand import Bench, measured
from fulmen.ids import uuid7
from fulmen.store.v1 import (
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    span_pb2,
    span_service_pb2,
    span_service_pb2_grpc,
)

SPANS_PER_CHUNK = 256
CHUNKS_PER_REQUEST = 8
WRITERS = 4
OTLP_BATCH = 512
ATTRIBUTES = 8
TEXTS = [secrets.token_hex(20) for _ in range(4096)]
TEN_SPANS_TEXTS = [secrets.token_hex(55) for _ in range(4096)]

_compressor = zstandard.ZstdCompressor(level=1)


def span(number: int, texts: list[str], values: list[str] | None = None) -> trace_pb2.Span:
    """Makes a span with eight text attributes and ids of its own."""
    now = time.time_ns()
    made = trace_pb2.Span(
        name="chat tiny-model",
        trace_id=secrets.token_bytes(16),
        span_id=secrets.token_bytes(8),
        start_time_unix_nano=now,
        end_time_unix_nano=now + 1_000_000 + number,
    )
    for key in range(ATTRIBUTES):
        value = values[key] if values else texts[secrets.randbelow(len(texts))]
        made.attributes.add(key=f"gen_ai.attribute.{key}", value=common_pb2.AnyValue(string_value=value))
    return made


@cache
def _ten_span_payloads() -> list[bytes]:
    """Makes payloads of ten spans of 1 kB each: what the agents' side does is not what is measured."""
    return [
        _compressor.compress(
            span_pb2.SpanBatch(
                spans=[
                    span_pb2.SpanRecord(otlp_span=span(number, TEN_SPANS_TEXTS).SerializeToString(), scope="bench")
                    for number in range(10)
                ]
            ).SerializeToString()
        )
        for _ in range(256)
    ]


def ten_spans(attempt: str) -> span_pb2.SpanChunk:
    """Makes a chunk of ten spans of 1 kB each, as a runner would send for a short rollout."""
    payloads = _ten_span_payloads()
    return span_pb2.SpanChunk(
        attempt=attempt,
        chunk_id=str(uuid7()),
        span_count=10,
        codec=span_pb2.SPAN_CODEC_ZSTD,
        payload=payloads[secrets.randbelow(len(payloads))],
    )


def _payload() -> bytes:
    """Makes a chunk of spans of about 600 bytes each that nothing but their names has in common."""
    texts = [secrets.token_hex(20) for _ in range(SPANS_PER_CHUNK * ATTRIBUTES)]
    records = [
        span_pb2.SpanRecord(otlp_span=span(number, texts).SerializeToString(), scope="bench")
        for number in range(SPANS_PER_CHUNK)
    ]
    return zstandard.ZstdCompressor(level=3).compress(span_pb2.SpanBatch(spans=records).SerializeToString())


async def _attempts(bench: Bench, count: int) -> list[str]:
    stub = rollout_service_pb2_grpc.RolloutServiceStub(bench.channel)
    rollouts = [rollout_pb2.Rollout() for _ in range(count)]
    response = await stub.BatchCreateRollouts(rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=rollouts))
    return [f"{rollout.name}/attempts/1" for rollout in response.rollouts]


async def append(bench: Bench, seconds: float) -> int:
    """Appends chunks over streams for so long; returns how many spans were acknowledged."""
    attempts, payloads = await _attempts(bench, 64), [_payload() for _ in range(8)]
    deadline, accepted = time.perf_counter() + seconds, 0

    async def write(position: int) -> None:
        nonlocal accepted
        stream = span_service_pb2_grpc.SpanServiceStub(bench.channel).AppendSpans()
        in_flight = 0
        while time.perf_counter() < deadline or in_flight:
            if time.perf_counter() < deadline and in_flight < 4:
                chunks = [
                    span_pb2.SpanChunk(
                        attempt=attempts[(position + index) % len(attempts)],
                        chunk_id=str(uuid7()),
                        span_count=SPANS_PER_CHUNK,
                        codec=span_pb2.SPAN_CODEC_ZSTD,
                        payload=payloads[index % len(payloads)],
                    )
                    for index in range(CHUNKS_PER_REQUEST)
                ]
                await stream.write(span_service_pb2.AppendSpansRequest(chunks=chunks))
                in_flight += 1
            else:
                answer = await stream.read()
                accepted += answer.accepted_count * SPANS_PER_CHUNK
                in_flight -= 1
        await stream.done_writing()

    await asyncio.gather(*(write(position) for position in range(WRITERS)))
    return accepted


async def otlp(bench: Bench, seconds: float) -> int:
    """Exports batches over OTLP/gRPC for so long; returns how many spans were acknowledged."""
    stub = trace_service_pb2_grpc.TraceServiceStub(bench.channel)
    requests = []
    for attempt in await _attempts(bench, WRITERS):
        name, _, number = attempt.partition("/attempts/")
        resource = resource_pb2.Resource(
            attributes=[
                common_pb2.KeyValue(key="fulmen.rollout", value=common_pb2.AnyValue(string_value=name)),
                common_pb2.KeyValue(key="fulmen.attempt", value=common_pb2.AnyValue(int_value=int(number))),
            ]
        )
        scoped = trace_pb2.ScopeSpans(spans=[span(index, TEXTS) for index in range(OTLP_BATCH)])
        requests.append(
            trace_service_pb2.ExportTraceServiceRequest(
                resource_spans=[trace_pb2.ResourceSpans(resource=resource, scope_spans=[scoped])]
            )
        )
    deadline, accepted = time.perf_counter() + seconds, 0

    async def export(position: int) -> None:
        nonlocal accepted
        request = requests[position]
        while time.perf_counter() < deadline:
            # Spans that were sent before would be dropped as repeats.
            prefix = secrets.token_bytes(4)
            for number, one in enumerate(request.resource_spans[0].scope_spans[0].spans):
                one.span_id = prefix + number.to_bytes(4)
            answer = await stub.Export(request)
            accepted += OTLP_BATCH - answer.partial_success.rejected_spans

    await asyncio.gather(*(export(position) for position in range(WRITERS)))
    return accepted


async def stored_bytes(dsn: str) -> int:
    """Returns how much disk the chunks take, indexes and the unused space of pages included."""
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(
            "select sum(pg_total_relation_size(inhrelid))::bigint from pg_inherits"
            " where inhparent = 'span_chunk'::regclass"
        )
    finally:
        await connection.close()


async def run(bench: Bench) -> None:
    """Runs the measurements of spans."""
    seconds, repeats = (2.0, 1) if bench.short else (5.0, 3)
    before, kept = await stored_bytes(bench.dsn), 0
    for name, work, goal in (
        (f"spans, {SPANS_PER_CHUNK} per chunk", append, 150_000),
        (f"spans by OTLP/gRPC, {OTLP_BATCH} per export", otlp, 20_000),
    ):
        rates = []
        for _ in range(repeats):
            count, took = await measured(bench, name, partial(work, bench, seconds))
            rates.append(count / took)
            kept += count
        bench.raw[name]["rates"] = [round(rate, 1) for rate in rates]
        bench.claim(name, statistics.median(rates), "spans/s", goal, "higher")
        if work is append:
            size = (await stored_bytes(bench.dsn) - before) / kept
            bench.claim("disk per span of 600 B, chunked", size, "bytes", 400, "lower")
