"""Stored spans, which agents write: read by the store's lists and filters, and by a trainer. Two parts: filter, chunk."""

from __future__ import annotations

import contextlib
import json
import random
from uuid import UUID

import zstandard
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.ids import parse_attempt_name
from fulmen.model_call import ModelCallInvalid
from fulmen.store.v1.span_pb2 import SpanBatch, SpanChunk, SpanCodec, SpanRecord
from fulmen.store.v1.span_service_pb2 import SpanFilter
from fulmen.trajectories import conversations, trajectory
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen.zstd import FrameInvalid, decompress
from fulmen_algorithm.clients.decode import rollout_trajectory
from fulmen_store.spans.span_filter import SpanFilter as SpanFilterRule
from fulmen_store.transport.wire.spans import (
    ChunkUnreadable,
    Listing,
    chunk_message,
    content_problem,
    filtered_chunks,
    read_chunk,
    read_filter,
)
from tests.fuzz.mutation import decoded, framed, mutate_bytes, mutate_json, mutate_message, unframed
from tests.fuzz.target import PureTarget, check_text

ATTEMPT = "projects/default/rollouts/0190a0b0-1234-7000-8000-00000000abcd/attempts/2"


_WANTED = SpanFilter(
    names=["chat m"], name_prefix="chat", errors_only=False, model_calls_only=True, attributes={"fulmen.agent": "a"}
)


def run(data: bytes) -> None:
    """Checks a chunk as the store does; lists and filters one that the store would accept; reads any as a trainer does."""
    _, parts = unframed(data)
    wanted, packed = [*parts, b"", b""][:2]
    message = decoded(SpanChunk, packed)
    with contextlib.suppress(ModelCallInvalid):
        conversations(trajectory([message]))
    rollout_trajectory([message])
    new = read_chunk(message)
    if isinstance(new, str):
        check_text(new)
        return
    chunk = new.chunk
    check_text(content_problem(chunk, own=None))
    content_problem(chunk, own=parse_attempt_name(ATTEMPT))
    chosen = read_filter(decoded(SpanFilter, wanted)) or SpanFilterRule()
    with contextlib.suppress(ChunkUnreadable):
        filtered_chunks(chunk, new.project, chosen, set())
        listing = Listing(new.project, after=None, limit=2, max_bytes=1000, wanted=chosen)
        listing.add(chunk)
        listing.spans()
    chunk_message(chunk, new.project)


def chunk_of(batch: SpanBatch, *, codec: int = SpanCodec.SPAN_CODEC_ZSTD) -> SpanChunk:
    """Packs a batch as writers do."""
    payload = batch.SerializeToString()
    chunk = SpanChunk(
        attempt=ATTEMPT, chunk_id=str(UUID(int=5)), span_count=len(batch.spans), codec=codec,
        payload=zstandard.compress(payload) if codec == SpanCodec.SPAN_CODEC_ZSTD else payload,
    )  # fmt: skip
    chunk.start_time.seconds, chunk.end_time.seconds = 10**9, 10**9 + 1
    return chunk


def record(number: int = 1) -> SpanRecord:
    """Returns a span of a captured call, as the proxy writes it."""
    span = Span(span_id=bytes(7) + bytes([number]), trace_id=bytes(16), name="chat m", start_time_unix_nano=10**18)
    span.attributes.add(key="fulmen.agent").value.string_value = "a"
    span.attributes.add(key="fulmen.step").value.int_value = number
    span.attributes.add(key="http.request.resend_count").value.int_value = number - 1
    span.attributes.add(key="gen_ai.response.id").value.string_value = "r"
    call = ModelCallRecord(
        model="m", policy="p", prompt_token_ids=bytes(8), completion_token_ids=bytes(8), completion_logprobs=bytes(8),
        finish_reason="stop", usable=True, request_json=json.dumps({"messages": MESSAGES, "tools": TOOLS}).encode(),
        response_json=json.dumps({"choices": [{"index": 0, "message": MESSAGES[-1]}]}).encode(),
    )  # fmt: skip
    call.policy_versions.add(version=1, start=0, end=2)
    return SpanRecord(otlp_span=span.SerializeToString(), model_call=call.SerializeToString(), scope="fulmen.llm_proxy")


MESSAGES = [
    {"role": "system", "content": "s"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "t", "content": "r"}],
    },
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "h"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}],
    },
]
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}, {"type": "function", "function": {"name": "g"}}]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes the filter, the chunk, a span in it, its record, or the JSON in that."""
    head, parts = unframed(data)
    wanted, packed = [*parts, b"", b""][:2]
    if rng.random() < 0.15:
        chosen = decoded(SpanFilter, wanted)
        mutate_message(chosen, rng, ("fulmen.agent", "chat m"))
        return framed(head, chosen.SerializeToString(), packed)
    if rng.random() < 0.15:
        return framed(head, wanted, mutate_bytes(packed, rng))
    chunk = decoded(SpanChunk, packed)
    if rng.random() < 0.15:
        mutate_message(chunk, rng, (ATTEMPT,))
        return framed(head, wanted, chunk.SerializeToString())
    batch = decoded(SpanBatch, _payload(chunk))
    if not batch.spans:
        batch.spans.add().CopyFrom(record())
    if rng.random() < 0.1 and len(batch.spans) < 20:
        batch.spans.add().CopyFrom(rng.choice(list(batch.spans)))
    _mutate_record(rng.choice(list(batch.spans)), rng)
    return framed(head, wanted, chunk_of(batch, codec=rng.choice((1, 2))).SerializeToString())


def _payload(chunk: SpanChunk) -> bytes:
    with contextlib.suppress(FrameInvalid):
        if chunk.codec == SpanCodec.SPAN_CODEC_ZSTD:
            return decompress(chunk.payload, max_bytes=1 << 20)
    return chunk.payload


def _mutate_record(record: SpanRecord, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0:
            span = decoded(Span, record.otlp_span)
            mutate_message(span, rng, ("fulmen.agent", "fulmen.step", "gen_ai.response.id", "r"), depth=4)
            record.otlp_span = span.SerializeToString()
        case 1:
            record.otlp_span = mutate_bytes(record.otlp_span, rng)
        case 2:
            record.model_call = mutate_bytes(record.model_call, rng)
        case _:
            call = decoded(ModelCallRecord, record.model_call)
            name = rng.choice(("request_json", "response_json", ""))
            if name:
                setattr(call, name, mutate_json(getattr(call, name), rng))
            else:
                mutate_message(call, rng, ("p", "m"))
            record.model_call = call.SerializeToString()


TARGET = PureTarget(
    run=run,
    seeds=[
        framed(
            "spans", _WANTED.SerializeToString(), chunk_of(SpanBatch(spans=[record(1), record(2)])).SerializeToString()
        ),
        framed("spans", b"", chunk_of(SpanBatch(spans=[record()]), codec=1).SerializeToString()),
    ],
    mutate=mutate,
)
