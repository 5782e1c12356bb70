"""OTLP over HTTP: any OpenTelemetry SDK is a writer, and no body harms the store."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from google.protobuf import json_format
from google.rpc import status_pb2
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from fulmen.store.v1 import span_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import Runner, StoreHandle, Stubs, create, running_store

PROTOBUF = "application/x-protobuf"
LIMIT_BYTES = 64 * 1024
NOBODY = "projects/default/rollouts/01900000-0000-7000-8000-000000000000"

# As @opentelemetry/exporter-trace-otlp-http 0.57 sends it: ids in hexadecimal, times as strings, enums as numbers.
JS_BODY = {
    "resourceSpans": [
        {
            "resource": {
                "attributes": [{"key": "service.name", "value": {"stringValue": "js-agent"}}],
                "droppedAttributesCount": 0,
            },
            "scopeSpans": [
                {
                    "scope": {"name": "my-agent", "version": "1.0"},
                    "spans": [
                        {
                            "traceId": "5B8EFFF798038103D269B633813FC60C",
                            "spanId": "eee19b7ec3c1b174",
                            "parentSpanId": "eee19b7ec3c1b173",
                            "name": "I'm a server span",
                            "kind": 2,
                            "startTimeUnixNano": "1544712660000000000",
                            "endTimeUnixNano": "1544712661000000000",
                            "attributes": [
                                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": 17}},
                                {"key": "streamed", "value": {"boolValue": True}},
                                {"key": "raw", "value": {"bytesValue": "AQI="}},
                            ],
                            "events": [{"name": "first token", "timeUnixNano": "1544712660500000000"}],
                            "links": [{"traceId": "5b8efff798038103d269b633813fc60d", "spanId": "eee19b7ec3c1b175"}],
                            "status": {"code": 2, "message": "no"},
                            "flags": 257,
                            "somethingNew": {"x": 1},
                        }
                    ],
                }
            ],
        }
    ]
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    status: int
    headers: Any
    body: bytes

    @property
    def error(self) -> status_pb2.Status:
        """The error, in whichever encoding."""
        if self.headers["content-type"] == PROTOBUF:
            return status_pb2.Status.FromString(self.body)
        return json_format.Parse(self.body, status_pb2.Status())


class Http:
    """Posts to one store."""

    def __init__(self, session: aiohttp.ClientSession, store: StoreHandle) -> None:
        self._session = session
        self.store = store
        self.base = f"http://127.0.0.1:{store.parts.ports['http_port']}"

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Sends one request; header names are written with underscores."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.request(method, self.base + path, data=body, headers=sent) as answer:
            return Answer(status=answer.status, headers=answer.headers, body=await answer.read())

    async def post(self, body: bytes, token: str, kind: str = PROTOBUF, **headers: str) -> Answer:
        """Posts spans."""
        return await self.send(
            "POST", "/v1/traces", body, authorization=f"Bearer {token}", content_type=kind, **headers
        )


@pytest.fixture
async def http(database_url: str) -> AsyncIterator[Http]:
    """Yields a client of a store that takes small bodies only."""
    async with running_store(database_url, max_message_bytes=LIMIT_BYTES) as store, aiohttp.ClientSession() as session:
        yield Http(session, store)


async def attempt_of(stubs: Stubs) -> Any:
    """Returns the assignment of a new rollout."""
    await create(stubs)
    (assignment,) = await (await Runner(stubs).open()).take(1)
    return assignment


async def spans_of(stubs: Stubs, parent: str) -> list[trace_pb2.Span]:
    """Lists spans."""
    page = await stubs.spans.ListSpans(pb.ListSpansRequest(parent=parent))
    return [trace_pb2.Span.FromString(each.span.otlp_span) for each in page.spans]


def export(*names: str, rollout: str = "") -> bytes:
    """Makes an export."""
    spans = [
        {"name": name, "trace_id": b"t" * 16, "span_id": f"{index:08}".encode(), "start_time_unix_nano": 1 + index}
        for index, name in enumerate(names)
    ]
    attributes = [
        {"key": "fulmen.rollout", "value": {"string_value": rollout}},
        {"key": "fulmen.attempt", "value": {"int_value": 1}},
    ]
    resource_spans = {
        "resource": {"attributes": attributes if rollout else []},
        "scope_spans": [{"scope": {"name": "tests"}, "spans": spans}],
    }
    return trace_service_pb2.ExportTraceServiceRequest(resource_spans=[resource_spans]).SerializeToString()


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_an_opentelemetry_sdk_writes_over_http(http: Http, compression: Compression) -> None:
    stubs = await http.store.stubs()
    assignment = await attempt_of(stubs)
    exporter = OTLPSpanExporter(
        endpoint=f"{http.base}/v1/traces",
        headers={"authorization": f"Bearer {assignment.attempt_key}"},
        compression=compression,
    )

    await asyncio.to_thread(_trace, exporter)

    assert [span.name for span in await spans_of(stubs, assignment.attempt)] == ["outer", "inner"]


def _trace(exporter: OTLPSpanExporter) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "agent"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
        pass
    provider.shutdown()


async def test_json_as_the_javascript_sdk_sends_it_is_taken(http: Http) -> None:
    stubs = await http.store.stubs()
    assignment = await attempt_of(stubs)

    answer = await http.post(json.dumps(JS_BODY).encode(), assignment.attempt_key, "application/json; charset=utf-8")

    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert json.loads(answer.body) == {}
    (span,) = await spans_of(stubs, assignment.attempt)
    assert span.trace_id.hex() == "5b8efff798038103d269b633813fc60c"
    assert (span.span_id.hex(), span.parent_span_id.hex()) == ("eee19b7ec3c1b174", "eee19b7ec3c1b173")
    assert span.links[0].span_id.hex() == "eee19b7ec3c1b175"
    assert (span.start_time_unix_nano, span.status.code, span.kind) == (1544712660000000000, 2, 2)
    assert {pair.key: pair.value.WhichOneof("value") for pair in span.attributes} == {
        "gen_ai.usage.input_tokens": "int_value",
        "streamed": "bool_value",
        "raw": "bytes_value",
    }


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00"])
async def test_half_of_a_surrogate_pair_is_replaced_and_its_span_is_kept(http: Http, half: str, encoding: str) -> None:
    stubs = await http.store.stubs()
    assignment = await attempt_of(stubs)
    # A text that Node cut inside of an emoji; the one before it is whole.
    body = (
        json.dumps(JS_BODY).replace("I'm a server span", f"\\ud83d\\ude00 cut {half}").replace("js-agent", f"{half}x")
    )

    answer = await http.post(body.encode(encoding), assignment.attempt_key, "application/json")

    assert (answer.status, json.loads(answer.body)) == (200, {})
    assert [span.name for span in await spans_of(stubs, assignment.attempt)] == ["\U0001f600 cut \ufffd"]


async def test_spans_that_cannot_be_kept_are_counted_in_the_answer_and_the_others_are_kept(http: Http) -> None:
    stubs = await http.store.stubs()
    (name,) = await create(stubs)
    body = export("kept", rollout=name) + export("lost", "lost too", rollout=NOBODY) + export("homeless")

    answer = await http.post(body, http.store.token(Role.RUNNER))

    response = trace_service_pb2.ExportTraceServiceResponse.FromString(answer.body)
    assert (answer.status, response.partial_success.rejected_spans) == (200, 3)
    assert "1 spans name no attempt" in response.partial_success.error_message
    assert "2 spans are of rollouts that do not exist" in response.partial_success.error_message
    assert [span.name for span in await spans_of(stubs, name)] == ["kept"]


async def test_an_attempt_named_by_the_environment_of_an_sdk_is_found(http: Http) -> None:
    stubs = await http.store.stubs()
    (name,) = await create(stubs)
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(export("x", rollout=name))
    # OTEL_RESOURCE_ATTRIBUTES=fulmen.rollout=...,fulmen.attempt=1
    request.resource_spans[0].resource.attributes[1].value.string_value = "1"

    await http.post(request.SerializeToString(), http.store.token(Role.RUNNER))

    assert len(await spans_of(stubs, f"{name}/attempts/1")) == 1


async def test_an_export_that_is_sent_again_is_stored_once(http: Http, database_url: str) -> None:
    stubs = await http.store.stubs()
    (name,) = await create(stubs)
    for _ in range(3):
        assert (await http.post(export("a", "b", rollout=name), http.store.token(Role.RUNNER))).status == 200

    stream = stubs.spans.StreamSpans(pb.StreamSpansRequest(parents=[name]))
    chunks = [chunk async for message in stream for chunk in message.chunks]

    assert [chunk.span_count for chunk in chunks] == [2]


async def test_exports_of_one_attempt_that_arrive_together_share_chunks(http: Http) -> None:
    stubs = await http.store.stubs()
    (name,) = await create(stubs)
    token = http.store.token(Role.RUNNER)
    bodies = []
    for number in range(40):
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(export("x", rollout=name))
        request.resource_spans[0].scope_spans[0].spans[0].span_id = f"{number:08}".encode()
        bodies.append(request.SerializeToString())

    answers = await asyncio.gather(*(http.post(body, token) for body in bodies))

    assert {answer.status for answer in answers} == {200}
    stream = stubs.spans.StreamSpans(pb.StreamSpansRequest(parents=[name]))
    counts = [chunk.span_count async for message in stream for chunk in message.chunks]
    assert sum(counts) == 40
    assert len(counts) < 40
    assert len(await spans_of(stubs, name)) == 40


@pytest.mark.parametrize("kind", [PROTOBUF, "application/json"])
async def test_errors_are_statuses_in_the_encoding_of_the_request(http: Http, kind: str) -> None:
    no_token = await http.send("POST", "/v1/traces", b"", content_type=kind)
    client = await http.post(b"", http.store.token(Role.CLIENT), kind)
    malformed = await http.post(b"\xff\x00 not an export: secret words", http.store.token(Role.RUNNER), kind)

    assert [no_token.status, client.status, malformed.status] == [401, 403, 400]
    assert {answer.headers["content-type"] for answer in (no_token, client, malformed)} == {kind}
    assert [answer.error.code for answer in (no_token, client, malformed)] == [16, 7, 3]
    assert b"secret" not in malformed.body


@pytest.mark.parametrize(
    ("kind", "encoding", "status"),
    [
        ("text/plain", "", 415),
        ("", "", 415),
        (PROTOBUF, "br", 415),
        (PROTOBUF, "identity", 200),
        (PROTOBUF, "gzip", 400),
    ],
)
async def test_what_a_body_is_written_in_must_be_known(http: Http, kind: str, encoding: str, status: int) -> None:
    answer = await http.post(b"", http.store.token(Role.RUNNER), kind, content_encoding=encoding)
    if encoding == "gzip":
        answer = await http.post(b"no gzip", http.store.token(Role.RUNNER), kind, content_encoding=encoding)

    assert answer.status == status


async def test_a_body_over_the_limit_is_refused_also_when_it_is_packed(http: Http) -> None:
    token = http.store.token(Role.RUNNER)
    bomb = gzip.compress(bytes(50 * LIMIT_BYTES))
    assert len(bomb) < LIMIT_BYTES / 4

    large = await http.post(bytes(LIMIT_BYTES + 1), token)
    packed = await http.post(bomb, token, content_encoding="gzip")
    members = await http.post(gzip.compress(bytes(LIMIT_BYTES)) * 2, token, content_encoding="gzip")
    cut = await http.post(gzip.compress(export("x"))[:-4], token, content_encoding="gzip")

    assert [large.status, packed.status, members.status, cut.status] == [413, 413, 413, 400]
    assert large.error.code == packed.error.code == 8


async def test_deep_json_does_no_harm(http: Http) -> None:
    deep = b'{"resourceSpans":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    value = b'{"arrayValue":{"values":[' * 300 + b"]}}" * 300
    nested = b'{"resourceSpans":[{"resource":{"attributes":[{"key":"x","value":%s}]}}]}' % value

    answers = [await http.post(body, http.store.token(Role.RUNNER), "application/json") for body in (deep, nested)]

    assert [answer.status for answer in answers] == [400, 400]
    assert (await http.send("GET", "/healthz")).status == 200


async def test_a_store_that_cannot_take_spans_now_says_when_to_come_back(http: Http) -> None:
    ingest = http.store.parts.roles["http-server"]._app._ingest
    ingest._bytes_in_flight = 2**40
    busy = await http.post(export("x"), http.store.token(Role.RUNNER))
    ingest._bytes_in_flight = 0
    http.store.parts.roles["http-server"]._app.draining = True
    draining = await http.post(export("x"), http.store.token(Role.RUNNER))
    health = await http.send("GET", "/healthz")
    http.store.parts.roles["http-server"]._app.draining = False

    assert [busy.status, draining.status, health.status] == [429, 503, 503]
    assert [busy.headers["retry-after"], draining.headers["retry-after"]] == ["1", "1"]


async def test_other_paths_and_methods_are_named(http: Http) -> None:
    assert (await http.send("GET", "/healthz")).status == 200
    assert (await http.send("GET", "/v1/traces")).status == 405
    assert (await http.send("POST", "/v1/logs")).status == 404
