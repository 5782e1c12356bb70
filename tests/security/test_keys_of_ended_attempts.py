"""The key of an ended attempt adds spans until the grace is over, then nothing."""

from __future__ import annotations

import time

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from fulmen.errors import TokenInvalid
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import lease_pb2, span_service_pb2
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, create, running_store

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def export(assignment: lease_pb2.Assignment, name: str) -> trace_service_pb2.ExportTraceServiceRequest:
    request = trace_service_pb2.ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="fulmen.rollout").value.string_value = assignment.rollout.name
    resource.resource.attributes.add(key="fulmen.attempt").value.int_value = assignment.epoch
    span = resource.scope_spans.add().spans.add(name=name, trace_id=b"t" * 16, span_id=name.encode().ljust(8, b"."))
    span.start_time_unix_nano = span.end_time_unix_nano = 1
    return request


async def over_grpc(
    store: StoreHandle, token: str, request: trace_service_pb2.ExportTraceServiceRequest
) -> trace_service_pb2.ExportTraceServiceResponse:
    async with open_channel(store.target, token=token) as channel:
        call = channel.unary_unary(
            EXPORT,
            request_serializer=trace_service_pb2.ExportTraceServiceRequest.SerializeToString,
            response_deserializer=trace_service_pb2.ExportTraceServiceResponse.FromString,
        )
        answer: trace_service_pb2.ExportTraceServiceResponse = await call(request)
        return answer


async def over_http(
    store: StoreHandle, token: str, request: trace_service_pb2.ExportTraceServiceRequest
) -> trace_service_pb2.ExportTraceServiceResponse:
    url = f"http://127.0.0.1:{store.parts.ports['http_port']}/v1/traces"
    headers = {"authorization": f"Bearer {token}", "content-type": "application/x-protobuf"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=request.SerializeToString(), headers=headers) as answer,
    ):
        return trace_service_pb2.ExportTraceServiceResponse.FromString(await answer.read())


async def ended(store: StoreHandle) -> lease_pb2.Assignment:
    """Returns an attempt that has ended."""
    stubs = await store.stubs()
    runner = await Runner(stubs).open()
    await create(stubs)
    (assignment,) = await runner.take(1)
    await runner.complete([assignment])
    return assignment


async def names(store: StoreHandle, attempt: str) -> int:
    stubs = await store.stubs()
    return len((await stubs.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=attempt))).spans)


@pytest.mark.parametrize("send", [over_grpc, over_http])
async def test_a_key_adds_spans_within_the_grace(store: StoreHandle, send) -> None:  # type: ignore[no-untyped-def]
    assignment = await ended(store)
    answer = await send(store, assignment.attempt_key, export(assignment, "late"))
    assert not answer.partial_success.rejected_spans
    assert await names(store, assignment.attempt) == 1


@pytest.mark.parametrize("send", [over_grpc, over_http])
async def test_a_key_adds_nothing_after_the_grace_and_is_told(database_url: str, send) -> None:  # type: ignore[no-untyped-def]
    async with running_store(database_url, attempt_key_grace_s=0) as store:
        assignment = await ended(store)
        answer = await send(store, assignment.attempt_key, export(assignment, "late"))
        assert answer.partial_success.rejected_spans == 1
        assert "end of their attempt" in answer.partial_success.error_message
        assert await names(store, assignment.attempt) == 0


async def test_chunks_by_the_key_are_refused_after_the_grace_and_those_of_services_are_not(database_url: str) -> None:
    async with running_store(database_url, attempt_key_grace_s=0) as store:
        assignment = await ended(store)
        for role in (Role.RUNNER, Role.SERVICE):
            answer = await over_grpc(store, store.token(role), export(assignment, str(role)))
            assert not answer.partial_success.rejected_spans
        stubs = await store.stubs()
        read = stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=[assignment.attempt]))
        [*chunks] = [chunk async for message in read for chunk in message.chunks]
        agent = await store.stubs(token=assignment.attempt_key)
        stream = agent.spans.AppendSpans()
        await stream.write(span_service_pb2.AppendSpansRequest(chunks=chunks[:1]))
        told = await stream.read()
        assert told.accepted_count == 0
        assert "the attempt has ended" in told.rejected[0].message


async def test_the_key_of_a_running_attempt_and_of_a_retried_one_is_judged_by_its_own_attempt(
    database_url: str,
) -> None:
    async with running_store(database_url, attempt_key_grace_s=0) as store:
        stubs = await store.stubs()
        runner = await Runner(stubs).open()
        await create(stubs)
        (running,) = await runner.take(1)
        answer = await over_grpc(store, running.attempt_key, export(running, "now"))
        assert not answer.partial_success.rejected_spans


def looks_expired(assignment: lease_pb2.Assignment) -> str:
    """Returns a key of the attempt as a store makes it whose clock is an hour behind."""
    return TokenSigner(SIGNING_KEY, clock=lambda: time.time() - 3600).attempt_key(
        assignment.attempt,
        project=assignment.rollout.project,
        lease_id=assignment.lease_id,
        epoch=assignment.epoch,
        mode="train",
        ttl_s=600,
    )


@pytest.mark.parametrize("send", [over_grpc, over_http])
async def test_a_key_that_looks_expired_adds_spans_while_its_attempt_runs(store: StoreHandle, send) -> None:  # type: ignore[no-untyped-def]
    stubs = await store.stubs()
    runner = await Runner(stubs).open()
    await create(stubs)
    (assignment,) = await runner.take(1)
    answer = await send(store, looks_expired(assignment), export(assignment, "late"))
    assert not answer.partial_success.rejected_spans
    assert await names(store, assignment.attempt) == 1


async def test_a_key_that_looks_expired_reads_and_adds_nothing_of_an_attempt_that_has_ended(store: StoreHandle) -> None:
    assignment = await ended(store)
    key = looks_expired(assignment)
    with pytest.raises(TokenInvalid, match="expired"):
        await over_grpc(store, key, export(assignment, "late"))
    agent = await store.stubs(token=key)
    with pytest.raises(TokenInvalid, match="expired"):
        await agent.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=assignment.attempt))
    assert await names(store, assignment.attempt) == 0
