"""A caller that does not take its answer slows its backend down, and is given up; one that is only slow is not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import psutil
import pytest

from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from fulmen.rpc.channel import open_channel
from tests.support.llm_proxy.rogue_backend import CHAT, DONE, STREAM_END, STREAM_HEAD, Peer, chunk, event, response
from tests.support.llm_proxy.rogue_world import (
    DEADLINE_S,
    OPENAI,
    TINY,
    RogueWorld,
    head_of,
    request_of,
    rogue_world,
    sized,
)

WRITE_TIMEOUT_S = 0.5
OFFERED_BYTES = 300_000_000
BUFFERED_BYTES = 40_000_000
"""More than the sockets between backend and caller hold, which grow to a few megabytes each; all in the proxy's own."""

EVENT = event(b'{"choices": [], "x": "' + b"x" * 60_000 + b'"}')


class Flood:
    """A backend's answer that goes on and on."""

    def __init__(self, offered_bytes: int = OFFERED_BYTES) -> None:
        self.offered_bytes = offered_bytes
        self.sent_bytes = 0
        self.over = asyncio.Event()

    async def __call__(self, peer: Peer) -> bool:
        """Sends until the proxy has left, or everything is sent."""
        try:
            await peer.send(STREAM_HEAD)
            while self.sent_bytes < self.offered_bytes:
                await peer.send(chunk(EVENT))
                self.sent_bytes += len(EVENT)
            await peer.send(chunk(DONE), STREAM_END)
        finally:
            self.over.set()
        return True


@pytest.fixture
async def world() -> AsyncIterator[RogueWorld]:
    """Yields a proxy that soon gives callers up."""
    async with rogue_world(write_timeout_s=WRITE_TIMEOUT_S, retry_deadline_s=0) as running:
        yield running


def asked_for(key: str, model: str = TINY, *, stream: bool = True) -> bytes:
    body = json.dumps(request_of(CHAT, model) | {"stream": stream}).encode()
    return head_of(CHAT, key, sized(body)) + body


async def errors_of(world: RogueWorld, side: str) -> float:
    value = world.proxy.registry.get_sample_value(
        "fulmen_llm_proxy_errors_total", {"cause": "caller_gone", "side": side}
    )
    return value or 0.0


async def test_a_caller_that_reads_nothing_holds_its_backend_up_and_is_given_up(world: RogueWorld) -> None:
    attempt, key = world.proxy.attempt()
    flood = world.backend.act = Flood()
    async with asyncio.timeout(DEADLINE_S):
        with socket.create_connection(("127.0.0.1", world.port)) as caller:
            caller.sendall(asked_for(key))
            await flood.over.wait()
            summary = await world.proxy.flush(attempt)
    assert 0 < flood.sent_bytes < BUFFERED_BYTES
    assert (summary.flushed, summary.call_count, summary.infra_failure_count, summary.unusable_count) == (True, 1, 0, 1)
    assert await errors_of(world, "caller") == 1
    assert world.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_reads_slowly_gets_everything(world: RogueWorld, stream: bool) -> None:
    async def large(peer: Peer) -> bool:
        await peer.send(response(b'{"choices": [], "x": "' + b"x" * 12_000_000 + b'"}'))
        return True

    attempt, key = world.proxy.attempt()
    world.backend.act = Flood(12_000_000) if stream else large
    last = DONE + b"\r\n0\r\n\r\n" if stream else b'"}'
    received, end, loop = 0, b"", asyncio.get_running_loop()
    begun = loop.time()
    async with asyncio.timeout(DEADLINE_S):
        with socket.create_connection(("127.0.0.1", world.port)) as caller:
            caller.setblocking(False)
            await loop.sock_sendall(caller, asked_for(key, stream=stream))
            while not end.endswith(last):
                part = await loop.sock_recv(caller, 100_000)
                assert part, "the connection was cut"
                received += len(part)
                end = (end + part)[-64:]
                await asyncio.sleep(0.02)
    assert received > 12_000_000
    assert loop.time() - begun > 2 * WRITE_TIMEOUT_S
    assert (await world.proxy.flush(attempt)).infra_failure_count == 0


async def test_a_large_answer_that_nobody_reads_does_not_stay_in_memory(world: RogueWorld) -> None:
    async def large(peer: Peer) -> bool:
        await peer.send(response(json.dumps({"choices": [], "x": "x" * 30_000_000}).encode()))
        return True

    def is_open(caller: socket.socket) -> bool:
        """True if the proxy's end of a connection is open: this process holds both."""
        port = caller.getsockname()[1]
        return any(one.raddr and one.raddr.port == port for one in psutil.Process().net_connections("tcp"))

    world.backend.act = large
    with socket.create_connection(("127.0.0.1", world.port)) as caller:
        caller.sendall(asked_for(world.key(), OPENAI, stream=False))
        async with asyncio.timeout(DEADLINE_S):
            while not is_open(caller):  # noqa: ASYNC110 - the kernel's table
                await asyncio.sleep(0.01)
            while is_open(caller):  # noqa: ASYNC110 - the kernel's table
                await asyncio.sleep(0.05)


async def test_a_caller_over_grpc_that_takes_no_message_is_given_up(world: RogueWorld) -> None:
    attempt, key = world.proxy.attempt()
    flood = world.backend.act = Flood()
    body = json.dumps(request_of(CHAT, TINY) | {"stream": True}).encode()
    async with asyncio.timeout(DEADLINE_S):
        async with open_channel(f"127.0.0.1:{world.proxy.parts.server.port}", token=key) as channel:
            stub = completion_service_pb2_grpc.CompletionServiceStub(channel)
            call = stub.StreamComplete(completion_service_pb2.StreamCompleteRequest(path=CHAT, body_json=body))
            await call.read()
            await flood.over.wait()
            summary = await world.proxy.flush(attempt)
            call.cancel()
    assert 0 < flood.sent_bytes < BUFFERED_BYTES
    assert (summary.flushed, summary.infra_failure_count, summary.unusable_count) == (True, 0, 1)
    assert await errors_of(world, "caller") == 1
