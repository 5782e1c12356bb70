"""A span that names another attempt than that of the key is refused, counted and explained; it is never filed elsewhere."""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any

import aiohttp
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2

from fulmen.store.v1 import lease_pb2, span_pb2, span_service_pb2
from fulmen_service_kit.security.tokens import Role
from tests.security.test_keys_of_ended_attempts import over_grpc, over_http
from tests.support.store.running import Runner, StoreHandle, Stubs, create, create_project

Export = trace_service_pb2.ExportTraceServiceRequest


async def over_json(store: StoreHandle, token: str, request: Export) -> trace_service_pb2.ExportTraceServiceResponse:
    """Exports in the JSON form, in which ids are hexadecimal."""
    document = json_format.MessageToDict(request)
    for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        span |= {key: base64.b64decode(span[key]).hex() for key in ("traceId", "spanId")}
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    url = f"http://127.0.0.1:{store.parts.ports['http_port']}/v1/traces"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=json.dumps(document), headers=headers) as answer,
    ):
        return json_format.Parse(await answer.read(), trace_service_pb2.ExportTraceServiceResponse())


def pair(key: str, value: str | int) -> common_pb2.KeyValue:
    """Returns an attribute."""
    held = common_pb2.AnyValue(string_value=value) if isinstance(value, str) else common_pb2.AnyValue(int_value=value)
    return common_pb2.KeyValue(key=key, value=held)


def export(attributes: list[common_pb2.KeyValue], *, of: str) -> Export:
    """Returns an export of one span, whose attributes or whose resource's name an attempt."""
    request = Export()
    resource = request.resource_spans.add()
    span = resource.scope_spans.add().spans.add(name="x", trace_id=b"t" * 16, span_id=b"s" * 8)
    span.start_time_unix_nano = span.end_time_unix_nano = 1
    (span if of == "the span" else resource.resource).attributes.extend(attributes)
    return request


async def leased(stubs: Stubs, **fields: Any) -> lease_pb2.Assignment:
    runner = await Runner(stubs).open()
    await create(stubs, **fields)
    (assignment,) = await runner.take(1)
    return assignment


async def span_count(stubs: Stubs, rollout: str) -> int:
    return len((await stubs.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=rollout))).spans)


def names(own: str, other: str) -> dict[str, list[common_pb2.KeyValue]]:
    """Returns attributes that name another attempt than the first of the rollout `own`."""
    return {
        "another rollout": [pair("fulmen.rollout", other), pair("fulmen.attempt", 1)],
        "another rollout without a number": [pair("fulmen.rollout", other)],
        "another attempt of the rollout": [pair("fulmen.rollout", own), pair("fulmen.attempt", 2)],
        "the rollout and another": [pair("fulmen.rollout", other), pair("fulmen.rollout", own)],
        "no rollout that could exist": [pair("fulmen.rollout", "projects/default/rollouts/x")],
    }


@pytest.mark.parametrize("send", [over_grpc, over_http, over_json])
@pytest.mark.parametrize("of", ["the span", "the resource"])
@pytest.mark.parametrize("what", names("", ""))
async def test_a_span_that_names_another_attempt_is_refused(
    store: StoreHandle, stubs: Stubs, send: Any, of: str, what: str
) -> None:
    await create_project(stubs, "projects/team-b")
    own = await leased(stubs)
    other = await leased(stubs, project="projects/team-b")
    attributes = names(own.rollout.name, other.rollout.name)[what]

    answer = await send(store, own.attempt_key, export(attributes, of=of))

    assert answer.partial_success.rejected_spans == 1
    assert "name an attempt other than the key's" in answer.partial_success.error_message
    assert await span_count(stubs, own.rollout.name) == await span_count(stubs, other.rollout.name) == 0


@pytest.mark.parametrize("send", [over_grpc, over_http, over_json])
@pytest.mark.parametrize("of", ["the span", "the resource"])
async def test_a_span_that_names_its_own_attempt_or_none_is_kept(
    store: StoreHandle, stubs: Stubs, send: Any, of: str
) -> None:
    own = await leased(stubs)
    rollout = pair("fulmen.rollout", own.rollout.name)
    for count, attributes in enumerate(
        ([], [rollout], [rollout, pair("fulmen.attempt", 1)], [rollout, pair("fulmen.attempt", "1")], [pair("a", "fulmen.rollout")]),
        start=1,
    ):  # fmt: skip
        request = export(attributes, of=of)
        request.resource_spans[0].scope_spans[0].spans[0].span_id = bytes([count] * 8)
        answer = await send(store, own.attempt_key, request)
        assert not answer.partial_success.rejected_spans
    assert await span_count(stubs, own.rollout.name) == 5


@pytest.mark.parametrize("role", [Role.ATTEMPT, Role.RUNNER])
async def test_a_chunk_of_the_key_holds_no_span_of_another(store: StoreHandle, stubs: Stubs, role: Role) -> None:
    own = await leased(stubs)
    other = await leased(stubs)
    request = export([pair("fulmen.rollout", other.rollout.name)], of="the span")
    span = request.resource_spans[0].scope_spans[0].spans[0].SerializeToString()
    chunk = span_pb2.SpanChunk(
        attempt=own.attempt,
        chunk_id=str(uuid.uuid4()),
        span_count=1,
        codec=span_pb2.SPAN_CODEC_IDENTITY,
        payload=span_pb2.SpanBatch(spans=[span_pb2.SpanRecord(otlp_span=span)]).SerializeToString(),
    )
    writer = await store.stubs(token=own.attempt_key if role is Role.ATTEMPT else store.token(role))
    call = writer.spans.AppendSpans()
    await call.write(span_service_pb2.AppendSpansRequest(chunks=[chunk]))
    answer = await call.read()
    call.cancel()
    # A runner says of which attempt a chunk is; what its spans say of themselves is theirs.
    if role is Role.ATTEMPT:
        assert [one.message for one in answer.rejected] == ["a span names an attempt other than the key's"]
    else:
        assert not answer.rejected
    assert await span_count(stubs, own.rollout.name) == (role is Role.RUNNER)
