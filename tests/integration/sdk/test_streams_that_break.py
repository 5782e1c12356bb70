"""A stream of requests has no retries by gRPC, which would keep what is sent: a connection that breaks then ends the process.

grpc/grpc issue 40283 ("ILLEGAL STATE: FORWARDED_BATCH", grpcio 1.85). Streams run in a process of their own.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import pkgutil
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from fulmen.errors import Unavailable
from fulmen.rpc.channel import CLIENT_STREAMS, open_channel
from fulmen.store.v1 import span_pb2, span_service_pb2, span_service_pb2_grpc

LIMIT_S = 60
WRITERS = 8
ENDS = 400
PAYLOAD_BYTES = 20_000
FIRST_CUT_BYTES, CUTS = 30_000, 23
CUT_STEP_BYTES = 61_000
"""Bytes after which the relay breaks its connections: odd sizes, so that cuts fall into all phases of a stream."""


class MuteStore(span_service_pb2_grpc.SpanServiceServicer):
    """Reads everything, and answers at the end alone: until then gRPC may keep a stream for a retry."""

    async def AppendSpans(
        self, requests: AsyncIterator[span_service_pb2.AppendSpansRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[span_service_pb2.AppendSpansResponse]:
        count = 0
        async for request in requests:
            count += len(request.chunks)
        yield span_service_pb2.AppendSpansResponse(accepted_count=count)


class BreakingRelay:
    """Forwards connections to a port, and aborts each after so many bytes from the client."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cuts = itertools.cycle(FIRST_CUT_BYTES + i * CUT_STEP_BYTES for i in range(CUTS))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self._port)
        left = next(self._cuts)

        async def forward() -> None:
            nonlocal left
            while left > 0 and (data := await reader.read(min(left, 65_536))):
                left -= len(data)
                out.write(data)
                await out.drain()

        async def back() -> None:
            while data := await there.read(65_536):
                writer.write(data)
                await writer.drain()

        backward = asyncio.create_task(back())
        try:
            await forward()
        except OSError:
            pass
        finally:
            backward.cancel()
            await asyncio.gather(backward, return_exceptions=True)
            writer.transport.abort()
            out.transport.abort()


async def write_until(stub: span_service_pb2_grpc.SpanServiceStub, ends: itertools.count[int]) -> None:
    """Writes one stream after the other, each until its connection breaks."""
    request = span_service_pb2.AppendSpansRequest(chunks=[span_pb2.SpanChunk(payload=b"x" * PAYLOAD_BYTES)])
    while next(ends) < ENDS:
        stream = stub.AppendSpans()
        reading = asyncio.create_task(stream.read())
        try:
            while True:
                await stream.write(request)
        except Unavailable:
            pass
        await asyncio.gather(reading, return_exceptions=True)


async def write_through_a_relay() -> None:
    server = grpc.aio.server()
    span_service_pb2_grpc.add_SpanServiceServicer_to_server(MuteStore(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    relay = await asyncio.start_server(BreakingRelay(port).serve, "127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}") as channel:
        stub, ends = span_service_pb2_grpc.SpanServiceStub(channel), itertools.count()
        await asyncio.gather(*(write_until(stub, ends) for _ in range(WRITERS)))
    relay.close()
    await server.stop(None)


def test_a_connection_that_breaks_under_streams_does_not_end_the_process() -> None:
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=LIMIT_S)

    assert ran.returncode == 0, ran.stderr[-2000:]


def test_every_rpc_that_takes_a_stream_is_named_as_one_without_retries() -> None:
    packages = ("fulmen.algorithm.v1", "fulmen.llm_proxy.v1", "fulmen.store.v1", "fulmen.keda")
    named = [package for package in packages if importlib.util.find_spec(package)]
    streams = set()
    for package in named:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            descriptor = getattr(importlib.import_module(module.name), "DESCRIPTOR", None)
            for service in descriptor.services_by_name.values() if descriptor else ():
                streams |= {f"/{service.full_name}/{rpc.name}" for rpc in service.methods if rpc.client_streaming}

    assert len(named) >= 3
    assert streams == CLIENT_STREAMS


async def test_a_stream_that_would_have_retries_is_refused_before_it_is_opened() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        for kind in (channel.stream_stream, channel.stream_unary):
            with pytest.raises(ValueError, match="takes a stream of requests"):
                kind("/made.up/Sends")


if __name__ == "__main__":
    asyncio.run(write_through_a_relay())
