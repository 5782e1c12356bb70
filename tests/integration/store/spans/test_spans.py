"""Spans: stored once, handed out as they came, from our own writers and from any OpenTelemetry SDK."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from fulmen.errors import PermissionDenied, RolloutNotFound
from fulmen.ids import DEFAULT_PROJECT, rollout_name, uuid7
from fulmen.store.v1 import span_pb2
from fulmen.store.v1 import span_service_pb2 as pb
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import Runner, StoreHandle, Stubs, create, get
from tests.support.store.spans import append, chunk_of, stored


async def test_a_chunk_is_stored_once_however_often_it_is_sent(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    chunk = chunk_of(f"{name}/attempts/1")
    for _ in range(3):
        response = await append(stubs, chunk)
        assert (response.accepted_count, list(response.rejected)) == (1, [])
    (read,) = await stored(stubs, name)
    assert (read.chunk_id, read.payload, read.span_count) == (chunk.chunk_id, chunk.payload, 3)


async def test_answers_come_in_order_and_bad_chunks_are_named(stubs: Stubs) -> None:
    (name,) = await create(stubs)
    good = chunk_of(f"{name}/attempts/1")
    unknown = chunk_of("projects/default/rollouts/01900000-0000-7000-8000-000000000000/attempts/1")
    empty = span_pb2.SpanChunk(attempt=f"{name}/attempts/1", chunk_id=str(uuid7()), span_count=1, codec=1)
    stream = stubs.spans.AppendSpans()
    for chunks in ([good], [unknown, empty], [good]):
        await stream.write(pb.AppendSpansRequest(chunks=chunks))
    responses = [await stream.read() for _ in range(3)]
    assert [response.accepted_count for response in responses] == [1, 0, 1]
    assert {refused.chunk_id for refused in responses[1].rejected} == {unknown.chunk_id, empty.chunk_id}


@pytest.mark.parametrize("time", [{"seconds": 10**15}, {"seconds": -1}, {"nanos": -5}, {"nanos": 2 * 10**9}], ids=str)
async def test_a_chunk_with_a_time_that_is_none_is_rejected_and_the_stream_goes_on(
    stubs: Stubs, time: dict[str, int]
) -> None:
    (name,) = await create(stubs)
    good, bad = (chunk_of(f"{name}/attempts/1") for _ in range(2))
    bad.end_time.CopyFrom(Timestamp(**time))
    stream = stubs.spans.AppendSpans()
    for chunks in ([bad, good], [good]):
        await stream.write(pb.AppendSpansRequest(chunks=chunks))
    first, second = [await stream.read() for _ in range(2)]
    assert [(one.chunk_id, one.message) for one in first.rejected] == [
        (bad.chunk_id, "start_time or end_time is out of range")
    ]
    assert (first.accepted_count, second.accepted_count) == (1, 1)


async def test_an_attempt_key_reaches_its_own_attempt_only(store: StoreHandle, stubs: Stubs) -> None:
    own, other = await create(stubs, 2)
    runner = await Runner(stubs).open()
    taken = {one.rollout.name: one for one in await runner.take(2)}
    agent = await store.stubs(token=taken[own].attempt_key)
    mine, theirs = chunk_of(taken[own].attempt), chunk_of(taken[other].attempt)
    forged = chunk_of(taken[own].attempt, model_call=b"a call that never was")
    response = await append(agent, mine, theirs, forged)
    assert response.accepted_count == 1
    assert {refused.chunk_id for refused in response.rejected} == {theirs.chunk_id, forged.chunk_id}
    assert [chunk.chunk_id for chunk in await stored(agent, taken[own].attempt)] == [mine.chunk_id]
    assert (await get(agent, own)).name == own
    with pytest.raises(PermissionDenied):
        await stored(agent, taken[other].attempt)
    with pytest.raises(PermissionDenied):
        await agent.spans.ListSpans(pb.ListSpansRequest(parent=other))
    for name in (other, rollout_name(DEFAULT_PROJECT, uuid7())):
        with pytest.raises(RolloutNotFound, match=r"^The rollout does not exist\."):
            await get(agent, name)
    with pytest.raises(PermissionDenied):
        await create(agent)


async def test_an_opentelemetry_sdk_with_an_attempt_key_is_a_writer(store: StoreHandle, stubs: Stubs) -> None:
    await create(stubs)
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    exporter = OTLPSpanExporter(
        endpoint=f"http://{store.target}",
        insecure=True,
        headers={"authorization": f"Bearer {assignment.attempt_key}"},
    )
    await asyncio.to_thread(_trace, exporter, {"service.name": "agent"}, {})
    page = await stubs.spans.ListSpans(pb.ListSpansRequest(parent=assignment.attempt))
    assert [trace_pb2.Span.FromString(span.span.otlp_span).name for span in page.spans] == ["outer", "inner"]
    assert page.spans[0].span.scope == "tests"
    assert {span.attempt for span in page.spans} == {assignment.attempt}


async def test_a_trusted_exporter_names_the_attempt_in_attributes(store: StoreHandle, stubs: Stubs) -> None:
    one, two = await create(stubs, 2)
    exporter = OTLPSpanExporter(
        endpoint=f"http://{store.target}",
        insecure=True,
        headers={"authorization": f"Bearer {store.token(Role.RUNNER)}"},
    )
    by_resource = {"fulmen.rollout": one, "fulmen.attempt": 1}
    await asyncio.to_thread(_trace, exporter, by_resource, {"fulmen.rollout": two, "fulmen.attempt": 3})
    first = await stubs.spans.ListSpans(pb.ListSpansRequest(parent=f"{one}/attempts/1"))
    second = await stubs.spans.ListSpans(pb.ListSpansRequest(parent=f"{two}/attempts/3"))
    assert [len(first.spans), len(second.spans)] == [1, 1]


def _trace(exporter: OTLPSpanExporter, resource: dict[str, object], inner: dict[str, object]) -> None:
    provider = TracerProvider(resource=Resource(resource), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner", attributes=inner):
        pass
    provider.shutdown()
