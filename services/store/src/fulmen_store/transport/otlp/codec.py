"""Splits OTLP exports by attempt without decoding spans.

An export is first decoded as a whole, in C, to validate it. It is then parsed with a schema of the same field numbers
in which resources, scopes and spans are plain bytes, which go into chunks unchanged. Only the times of a span are read,
and its attributes only if it seems to name a rollout.

Source: https://opentelemetry.io/docs/specs/otlp/, sections "Binary Protobuf Encoding" and "JSON Protobuf Encoding".
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple
from uuid import UUID

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid
from fulmen.ids import AttemptName, attempt_of, parse_attempt_name
from fulmen.store.v1 import span_pb2
from fulmen_store.spans.chunks import BYTES_PER_CHUNK, SPANS_PER_CHUNK, LooseSpans

__all__ = ["SplitExport", "export_from_json", "loose_spans", "names_another"]

ROLLOUT_KEY: Final = "fulmen.rollout"
ATTEMPT_KEY: Final = "fulmen.attempt"
# A nested message takes a tag and a length of at most 5 bytes each.
WRAPPING_BYTES: Final = 10
_ID_KEYS: Final = ("traceId", "trace_id", "spanId", "span_id", "parentSpanId", "parent_span_id")
_PACKAGE: Final = "fulmen.otlp.outline"


@cache
def _outline() -> dict[str, Any]:
    """Creates message classes with OTLP's field numbers that keep inner messages as bytes."""
    # Protobuf's own schema takes a megabyte, which no store needs before its first export over OTLP.
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    file = FileDescriptorProto(name="fulmen/otlp/outline.proto", package=_PACKAGE, syntax="proto3")
    one, many = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED
    octets, number = FieldDescriptorProto.TYPE_BYTES, FieldDescriptorProto.TYPE_FIXED64
    inner = FieldDescriptorProto.TYPE_MESSAGE
    for message, fields in {
        "Export": [("resource_spans", 1, inner, many, "ResourceSpans")],
        "ResourceSpans": [("resource", 1, octets, one, ""), ("scope_spans", 2, inner, many, "ScopeSpans")],
        "ScopeSpans": [("scope", 1, octets, one, ""), ("spans", 2, octets, many, "")],
        "SpanTimes": [("start_time_unix_nano", 7, number, one, ""), ("end_time_unix_nano", 8, number, one, "")],
    }.items():
        described = file.message_type.add(name=message)
        for name, position, kind, label, type_name in fields:
            added = described.field.add(name=name, number=position, type=kind, label=label)
            if type_name:
                added.type_name = f".{_PACKAGE}.{type_name}"
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in ("Export", "SpanTimes")}


_NOBODYS: Final = AttemptName(project="", rollout_id=UUID(int=0), number=0)


@dataclass(slots=True, kw_only=True)
class _Part:
    """Spans of one attempt that fit into one chunk."""

    records: list[span_pb2.SpanRecord] = field(default_factory=list)
    start_ns: int = 2**64
    end_ns: int = 0
    size_bytes: int = 0


class _Parts:
    """The parts of one attempt; the last is still being filled."""

    def __init__(self) -> None:
        self.done: list[_Part] = [_Part()]

    def add(self, record: span_pb2.SpanRecord, *, start_ns: int, end_ns: int, size_bytes: int) -> None:
        part = self.done[-1]
        if part.records and (len(part.records) >= SPANS_PER_CHUNK or part.size_bytes + size_bytes > BYTES_PER_CHUNK):
            part = _Part()
            self.done.append(part)
        part.records.append(record)
        part.start_ns = min(part.start_ns, start_ns)
        part.end_ns = max(part.end_ns, end_ns)
        part.size_bytes += size_bytes


class SplitExport(NamedTuple):
    """The spans of an export by attempt, and how many were refused.

    Attributes:
        loose: The spans by attempt.
        homeless: Number of spans that name no attempt.
        foreign: Number of spans that name another attempt than the key's.
        oversized: Number of spans that are too large to store.
    """

    loose: list[LooseSpans]
    homeless: int
    foreign: int
    oversized: int


def loose_spans(body: bytes, *, own: AttemptName | None) -> SplitExport:
    """Splits an OTLP export into spans by attempt.

    Args:
        body: A serialised `ExportTraceServiceRequest`.
        own: Attempt of the key, which every span belongs to; None to read it from the attributes of spans or resources.

    Raises:
        ArgumentInvalid: If it is not a well-formed export.
    """
    try:
        trace_service_pb2.ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        raise ArgumentInvalid("The body is not an ExportTraceServiceRequest.") from None
    found: dict[AttemptName, _Parts] = {}
    homeless = foreign = oversized = 0
    outline = _outline()
    for attempt, record in _records(outline["Export"].FromString(body), own):
        if attempt is None:
            homeless += 1
            continue
        if own is not None and attempt != own:
            foreign += 1
            continue
        size_bytes = len(record.otlp_span) + len(record.otlp_resource) + len(record.scope) + 4 * WRAPPING_BYTES
        if size_bytes > BYTES_PER_CHUNK:
            oversized += 1
            continue
        times = outline["SpanTimes"].FromString(record.otlp_span)
        found.setdefault(attempt, _Parts()).add(
            record, start_ns=times.start_time_unix_nano, end_ns=times.end_time_unix_nano, size_bytes=size_bytes
        )
    loose = [
        LooseSpans(
            rollout_id=attempt.rollout_id,
            attempt=attempt.number,
            span_count=len(part.records),
            start_ns=part.start_ns,
            end_ns=part.end_ns,
            raw=span_pb2.SpanBatch(spans=part.records).SerializeToString(),
            project=attempt.project,
            by_agent=own is not None,
        )
        for attempt, parts in found.items()
        for part in parts.done
    ]
    return SplitExport(loose, homeless, foreign, oversized)


def export_from_json(body: bytes) -> bytes:
    """Converts an OTLP/JSON export, where ids are hexadecimal and enums are numbers, to the binary form.

    Raises:
        ArgumentInvalid: If it is not a well-formed export.
    """
    # Imported lazily: it takes 4 MB, and few writers send JSON.
    from google.protobuf import json_format

    try:
        document = _document(body)
        for span in _json_spans(document):
            _ids_to_base64(span)
            for link in span.get("links", ()):
                _ids_to_base64(link)
        message = trace_service_pb2.ExportTraceServiceRequest()
        json_format.ParseDict(document, message, ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, binascii.Error, json_format.ParseError):
        # The parsers' messages quote the body, which may contain secrets.
        raise ArgumentInvalid("The body is not an ExportTraceServiceRequest in the JSON form of OTLP.") from None
    serialised: bytes = message.SerializeToString()
    return serialised


def _document(body: bytes) -> Any:
    """Decodes JSON; halves of surrogate pairs, which Node leaves when it cuts a text, become U+FFFD."""
    text = body.decode(json.detect_encoding(body), "replace")
    document = json.loads(text)
    if "\\ud" not in text.lower():
        return document
    text = json.dumps(document, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _records(export: Any, own: AttemptName | None) -> Iterator[tuple[AttemptName | None, span_pb2.SpanRecord]]:
    rollout_key = ROLLOUT_KEY.encode()
    for resource_spans in export.resource_spans:
        resource = resource_spans.resource
        fallback = own
        if rollout_key in resource:
            fallback = _attempt_of(resource_pb2.Resource.FromString(resource).attributes, own) or own
        for scope_spans in resource_spans.scope_spans:
            scope = common_pb2.InstrumentationScope.FromString(scope_spans.scope).name
            for span in scope_spans.spans:
                attempt = fallback
                if rollout_key in span:
                    attempt = _attempt_of(trace_pb2.Span.FromString(span).attributes, own) or fallback
                yield attempt, span_pb2.SpanRecord(otlp_span=span, scope=scope, otlp_resource=resource)


def names_another(record: span_pb2.SpanRecord, own: AttemptName) -> bool:
    """Returns True if a span or its resource names another attempt."""
    key, place = ROLLOUT_KEY.encode(), None
    try:
        if key in record.otlp_resource:
            place = _attempt_of(resource_pb2.Resource.FromString(record.otlp_resource).attributes, own)
        if key in record.otlp_span:
            place = _attempt_of(trace_pb2.Span.FromString(record.otlp_span).attributes, own) or place
    except DecodeError:
        return False
    return place not in (None, own)


def _attempt_of(attributes: Iterable[common_pb2.KeyValue], own: AttemptName | None) -> AttemptName | None:
    """Returns the attempt that attributes name; None if they name none.

    With the key of an attempt, a rollout without a number means that attempt, and any other name means no attempt.
    """
    rollouts, numbers = [], []
    for attribute in attributes:
        if attribute.key == ROLLOUT_KEY:
            rollouts.append(attribute.value.string_value)
        elif attribute.key == ATTEMPT_KEY:
            # OTEL_RESOURCE_ATTRIBUTES turns every value into a string.
            numbers.append(attribute.value.string_value or str(attribute.value.int_value))
    if not rollouts:
        return None
    if own is not None:
        # Of several, a reader may take any.
        return own if {*rollouts} == {own.rollout} and {*numbers} <= {str(own.number)} else _NOBODYS
    try:
        return parse_attempt_name(attempt_of(rollouts[-1], numbers[-1] if numbers else ""))
    except ArgumentInvalid:
        return None


def _json_spans(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource_spans in document.get("resourceSpans", document.get("resource_spans", ())):
        for scope_spans in resource_spans.get("scopeSpans", resource_spans.get("scope_spans", ())):
            yield from scope_spans.get("spans", ())


def _ids_to_base64(value: dict[str, Any]) -> None:
    for key in _ID_KEYS:
        if value.get(key):
            value[key] = base64.b64encode(bytes.fromhex(value[key])).decode()
