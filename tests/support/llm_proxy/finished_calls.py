"""Finished calls, and the spans that they become."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import msgspec.structs
import zstandard
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.store.v1 import span_pb2
from fulmen_llm_proxy.apis.api import decode_fields
from fulmen_llm_proxy.apis.chat import ChatApi
from fulmen_llm_proxy.apis.collected import Asked, Collected
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.capture.finished_call import FinishedCall
from fulmen_llm_proxy.capture.packed import PackedCalls
from fulmen_llm_proxy.capture.span_codec import SpanCodec
from fulmen_llm_proxy.capture.span_place import place_of
from fulmen_llm_proxy.routing.engines import Engine
from fulmen_llm_proxy.routing.table import Backend, Target

ATTEMPT = "projects/default/rollouts/0190a0b0-1234-7000-8000-00000000abcd/attempts/2"
TRACE_ID = "0190a0b01234700080000000" + "0000abcd"
CHAT = ChatApi()
CODEC = SpanCodec(instance_id="i")
BACKEND = Backend(id="one", base_url="https://models.example:8443/v1", engine=Engine.VLLM)
TARGET = Target(backend_id="one", model="byte-model", policy="p", policy_version=3)

JSON = dict[str, Any]


def finished(fields: JSON, collected: Collected | None, **changes: Any) -> FinishedCall:
    call = FinishedCall(
        attribution=Attribution(attempt=ATTEMPT, project="projects/default", epoch=1, mode="train"),
        api=CHAT,
        model="tiny",
        target=TARGET,
        backend=BACKEND,
        stream=False,
        fields=decode_fields(json.dumps(fields).encode()),
        collected=collected,
        captured=True,
        http_status=200,
        error_type="",
        start_ns=1_000,
        end_ns=5_000,
        first_byte_s=0.25,
        resend_count=0,
        place=place_of("", ATTEMPT),
        agent_name="",
        size_bytes=1,
    )
    return msgspec.structs.replace(call, **changes)


def collected_of(document: object) -> Collected:
    reader = CHAT.reader(Asked())
    reader.whole(json.dumps(document).encode())
    return reader.collected


def batches(packed: list[PackedCalls]) -> list[span_pb2.SpanBatch]:
    found = []
    for one in packed:
        chunk = span_pb2.SpanChunk.FromString(one.chunk)
        payload = chunk.payload
        if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
            payload = zstandard.ZstdDecompressor().decompress(payload)
        found.append(span_pb2.SpanBatch.FromString(payload))
    return found


def span_of(call: FinishedCall) -> Span:
    return Span.FromString(CODEC.encode(call).spans[0].otlp_span)


def plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes(span: Span) -> JSON:
    return {attribute.key: plain(attribute.value) for attribute in span.attributes}
