"""Reads the chunks of an attempt: its model calls in order, and the tree of all its spans.

Invariant: repeated chunks and spans count once, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fulmen.model_call import ModelCall, ModelCallInvalid, read_model_call
from fulmen.store.v1.span_pb2 import SpanBatch, SpanChunk, SpanCodec, SpanRecord
from fulmen.trajectories.roles import SpanTree
from fulmen.zstd import FrameInvalid, decompress

MAX_BATCH_BYTES = 64 * 1024 * 1024
"""Maximum decompressed size of a chunk."""

PROXY_SCOPE = "fulmen.llm_proxy"
"""Instrumentation scope of the proxy's spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpans:
    """The spans of an attempt.

    Attributes:
        calls: Captured model calls in order of start, choices of one call in their own order; a call without an agent
            name has its nearest ancestor's name.
        failed: Spans of failed model calls, which have no record.
        tree: All spans.
    """

    calls: tuple[ModelCall, ...]
    failed: tuple[Span, ...]
    tree: SpanTree


def read_attempt(chunks: Iterable[SpanChunk]) -> AttemptSpans:
    """Reads all chunks of one attempt.

    Raises:
        ModelCallInvalid: If a record is inconsistent, or a chunk cannot be decompressed or decoded.
    """
    tree = SpanTree()
    recorded: dict[bytes, tuple[SpanRecord, Span]] = {}
    failed: dict[bytes, Span] = {}
    for chunk in chunks:
        for record, span in records_of(chunk):
            # Each access to a bytes field copies it.
            is_recorded = bool(record.model_call)
            is_call = is_recorded or record.scope == PROXY_SCOPE
            tree.add(span, record.otlp_span, is_call=is_call)
            if is_recorded:
                recorded[span.span_id] = record, span
            elif is_call and span.status.code == Status.STATUS_CODE_ERROR:
                failed[span.span_id] = span
    for _, span in recorded.values():
        tree.put_below_client(span)
    calls = [_named(read_model_call(record, span=span), tree) for record, span in recorded.values()]
    calls.sort(key=lambda call: (call.start_time_ns, call.choice, call.span_id))
    return AttemptSpans(calls=tuple(calls), failed=tuple(failed.values()), tree=tree)


def read_calls(chunks: Iterable[SpanChunk]) -> list[ModelCall]:
    """Reads the captured model calls of one attempt in order of start; each span counts once.

    Raises:
        ModelCallInvalid: If a record is inconsistent or a chunk cannot be decompressed.
    """
    return list(read_attempt(chunks).calls)


def _named(call: ModelCall, tree: SpanTree) -> ModelCall:
    if call.agent_name:
        return call
    name = tree.agent_name(call.span_id)
    return replace(call, agent_name=name) if name else call


def records_of(chunk: SpanChunk) -> Iterator[tuple[SpanRecord, Span]]:
    """Yields the spans of a chunk, each with its record.

    Raises:
        ModelCallInvalid: If the chunk cannot be decompressed or decoded.
    """
    packed = _decompressed(chunk)
    try:
        for record in SpanBatch.FromString(packed).spans:
            yield record, Span.FromString(record.otlp_span)
    except DecodeError as error:
        raise ModelCallInvalid(f"Span chunk {chunk.chunk_id} contains no spans.") from error


def _decompressed(chunk: SpanChunk) -> bytes:
    match chunk.codec:
        case SpanCodec.SPAN_CODEC_IDENTITY:
            return chunk.payload
        case SpanCodec.SPAN_CODEC_ZSTD:
            try:
                return decompress(chunk.payload, max_bytes=MAX_BATCH_BYTES)
            except FrameInvalid as error:
                raise ModelCallInvalid(f"Span chunk {chunk.chunk_id} cannot be decompressed: it {error}") from error
        case _:
            raise ModelCallInvalid(f"Span chunk {chunk.chunk_id} has the unknown codec {chunk.codec}.")
