"""A stream that has ended says why to whoever goes on writing to it, as it does to a reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from fulmen.errors import Unavailable
from fulmen.rpc.channel import DuplexStream, open_channel
from fulmen.store.v1 import span_pb2, span_service_pb2, span_service_pb2_grpc

LIMIT_S = 20.0


class EndingStore(span_service_pb2_grpc.SpanServiceServicer):
    """Answers one message, then ends the stream: with an error, or well."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    async def AppendSpans(
        self, requests: AsyncIterator[span_service_pb2.AppendSpansRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[span_service_pb2.AppendSpansResponse]:
        async for _ in requests:
            yield span_service_pb2.AppendSpansResponse(accepted_count=1)
            break
        if self._code is not grpc.StatusCode.OK:
            await context.abort(self._code, "restarting")


async def write_until_refused(
    stream: DuplexStream[span_service_pb2.AppendSpansRequest, span_service_pb2.AppendSpansResponse],
    request: span_service_pb2.AppendSpansRequest,
) -> None:
    while True:
        await stream.write(request)


@pytest.mark.parametrize(
    ("code", "says"),
    [(grpc.StatusCode.UNAVAILABLE, "restarting|interrupted"), (grpc.StatusCode.OK, "closed the stream|interrupted")],
)
async def test_a_writer_learns_why_the_stream_has_ended(code: grpc.StatusCode, says: str) -> None:
    server = grpc.aio.server()
    span_service_pb2_grpc.add_SpanServiceServicer_to_server(EndingStore(code), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    request = span_service_pb2.AppendSpansRequest()
    try:
        async with asyncio.timeout(LIMIT_S), open_channel(f"127.0.0.1:{port}") as channel:
            stream = span_service_pb2_grpc.SpanServiceStub(channel).AppendSpans()
            await stream.write(request)
            assert (await stream.read()).accepted_count == 1
            with pytest.raises(Unavailable, match=says):
                await write_until_refused(stream, request)
            with pytest.raises(Unavailable, match=says):
                await stream.write(request)
    finally:
        await server.stop(None)


class CountingStore(span_service_pb2_grpc.SpanServiceServicer):
    """Answers every message."""

    async def AppendSpans(
        self, requests: AsyncIterator[span_service_pb2.AppendSpansRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[span_service_pb2.AppendSpansResponse]:
        async for request in requests:
            yield span_service_pb2.AppendSpansResponse(accepted_count=len(request.chunks))


async def test_several_tasks_may_write_to_one_stream() -> None:
    server = grpc.aio.server()
    span_service_pb2_grpc.add_SpanServiceServicer_to_server(CountingStore(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    request = span_service_pb2.AppendSpansRequest(chunks=[span_pb2.SpanChunk(payload=b"x" * 10_000)])
    try:
        async with asyncio.timeout(LIMIT_S), open_channel(f"127.0.0.1:{port}") as channel:
            stream = span_service_pb2_grpc.SpanServiceStub(channel).AppendSpans()
            async with asyncio.TaskGroup() as writers:
                for _ in range(50):
                    writers.create_task(stream.write(request))
            await stream.done_writing()
            answers = [answer async for answer in stream]
    finally:
        await server.stop(None)

    assert sum(answer.accepted_count for answer in answers) == 50
