"""OTLP exports, in protobuf or JSON: split by attempt. The first byte of an input chooses the encoding."""

from __future__ import annotations

import random

from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fulmen.ids import parse_attempt_name
from fulmen.store.v1.span_pb2 import SpanBatch
from fulmen_store.transport.otlp.codec import export_from_json, loose_spans
from tests.fuzz.mutation import decoded, mutate_bytes, mutate_json, mutate_message
from tests.fuzz.target import PureTarget

ATTEMPT = "projects/default/rollouts/0190a0b0-1234-7000-8000-00000000abcd/attempts/2"
_OWN = parse_attempt_name(ATTEMPT)


def export() -> ExportTraceServiceRequest:
    """Returns an export of two spans, one of which names its rollout."""
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add()
    spans.resource.attributes.add(key="fulmen.rollout").value.string_value = ATTEMPT.rpartition("/attempts")[0]
    scoped = spans.scope_spans.add()
    scoped.scope.name = "scope"
    for number in range(2):
        span = scoped.spans.add(trace_id=bytes(15) + b"\1", span_id=bytes(7) + bytes([number + 1]), name="s")
        span.start_time_unix_nano, span.end_time_unix_nano = 10**18, 10**18 + 5
        span.attributes.add(key="fulmen.rollout").value.string_value = ATTEMPT.rpartition("/attempts")[0]
        span.attributes.add(key="fulmen.attempt").value.int_value = 2
        span.links.add(trace_id=bytes(16), span_id=bytes(8))
        span.events.add(name="e", time_unix_nano=5).attributes.add(
            key="k"
        ).value.array_value.values.add().double_value = 1
    return request


def run(data: bytes) -> None:
    """Splits an export, with and without an attempt of its own; what was split can be read."""
    body = export_from_json(data[1:]) if data[:1] == b"j" else data[1:]
    for own in (None, _OWN):
        loose = loose_spans(body, own=own)[0]
        for each in loose:
            assert len(SpanBatch.FromString(each.raw).spans) == each.span_count


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes a document, a message or its bytes."""
    if data[:1] == b"j":
        return b"j" + mutate_json(data[1:], rng)
    if rng.random() < 0.4:
        return data[:1] + mutate_bytes(data[1:], rng)
    message = decoded(ExportTraceServiceRequest, data[1:])
    mutate_message(message, rng, (ATTEMPT, "fulmen.rollout", "fulmen.attempt"), depth=9)
    return b"p" + message.SerializeToString()


def json_export() -> bytes:
    """Returns the export in OTLP's JSON, where ids are hexadecimal."""
    text = MessageToJson(export())
    for packed, plain in (
        ("AAAAAAAAAAAAAAAAAAAAAQ==", "00" * 15 + "01"),
        ("AAAAAAAAAAE=", "00" * 7 + "01"),
        ("AAAAAAAAAAI=", "00" * 7 + "02"),
    ):
        text = text.replace(packed, plain)
    return text.encode()


TARGET = PureTarget(
    run=run, seeds=[b"p" + export().SerializeToString(), b"j" + json_export(), b"j{}", b"p"], mutate=mutate
)
