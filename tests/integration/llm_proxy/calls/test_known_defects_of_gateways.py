"""What gateways in general got wrong, over sockets; the list of all complaints is that of `test_known_defects`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy

DEADLINE_S = 40
ROOM_BYTES = 200_000
FLOOD_BYTES = 256 * 1024 * 1024
"""Much more than anybody reads who has refused it, and than sockets hold."""


@asynccontextmanager
async def a_small_proxy(store: FakeStore, backend: Backend) -> AsyncIterator[RunningProxy]:
    """Runs a proxy with room for one large request, or a few that are smaller."""
    sizes = {"max_request_bytes": ROOM_BYTES, "request_buffer_bytes": ROOM_BYTES}
    async with asyncio.timeout(DEADLINE_S), running_proxy(store.target, backend_url=backend.url, **sizes) as proxy:
        yield proxy


async def begin(
    proxy: RunningProxy, key: str, *headers: str, path: str = "/v1/chat/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends the head of a call."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.parts.ports["http_port"])
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", *headers, "", ""]
    writer.write("\r\n".join(lines).encode())
    await writer.drain()
    return reader, writer


async def test_bodies_have_room_for_so_many_bytes_together(store: FakeStore, backend: Backend) -> None:
    async with a_small_proxy(store, backend) as proxy:
        attempt, key = proxy.attempt()
        large = "x" * (ROOM_BYTES * 6 // 10)
        backend.switches.gate = asyncio.Event()
        first = asyncio.create_task(proxy.chat(key, large, max_tokens=1))
        await backend.arrived.acquire()
        status, told = await proxy.chat(key, large, max_tokens=1)
        reader, writer = await begin(proxy, key, f"content-length: {ROOM_BYTES * 6 // 10}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 429"), "what is announced is refused before it comes"
        writer.transport.abort()
        small = asyncio.create_task(proxy.chat(key, "small"))
        await backend.arrived.acquire()
        completions = completion_service_pb2_grpc.CompletionServiceStub(proxy.channel)
        body = b'{"model":"%s","messages":[{"role":"user","content":"%s"}]}' % (MODEL.encode(), large.encode())
        rpc = await completions.Complete(
            completion_service_pb2.CompleteRequest(path="/v1/chat/completions", body_json=body)
        )
        assert len(backend.received) == 2
        backend.switches.gate.set()
        assert [(await call)[0] for call in (first, small)] == [200, 200]
        assert (await proxy.chat(key, large, max_tokens=1))[0] == 200
        summary = await proxy.flush(attempt)
    assert (status, told["error"]["code"]) == (429, "too_many_bytes")
    assert (rpc.http_status, b"too_many_bytes" in rpc.body_json) == (429, True)
    # That there was no room is no fault of the agent's.
    assert (summary.call_count, summary.infra_failure_count) == (5, 2)


@pytest.mark.parametrize("length", [f"content-length: {ROOM_BYTES * 9 // 10}", "transfer-encoding: chunked"])
async def test_a_caller_that_leaves_while_it_uploads_gives_its_room_back(
    store: FakeStore, backend: Backend, length: str
) -> None:
    async with a_small_proxy(store, backend) as proxy:
        _, key = proxy.attempt()
        part, half = b"x" * (ROOM_BYTES * 6 // 10), "y" * (ROOM_BYTES // 2)
        for _ in range(3):
            _, writer = await begin(proxy, key, length)
            writer.write(part if "length" in length else b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
            while (await proxy.chat(key, half, max_tokens=1))[0] != 429:
                pass  # the part is still on its way
            writer.transport.abort()
            while (await proxy.chat(key, half, max_tokens=1))[0] != 200:
                pass  # its loss is
        assert (await proxy.chat(key, "y" * (ROOM_BYTES * 9 // 10), max_tokens=1))[0] == 200


@pytest.mark.parametrize("length", [f"content-length: {FLOOD_BYTES}", "transfer-encoding: chunked"])
@pytest.mark.parametrize("why", ["a key that is none", "a path that is none", "no room"])
async def test_an_upload_that_is_refused_ends(store: FakeStore, backend: Backend, why: str, length: str) -> None:
    """It would go on for ever: its sender does not look at answers before it has sent everything."""
    async with a_small_proxy(store, backend) as proxy:
        key = "none" if "key" in why else proxy.attempt()[1]
        path = "/v1/nothing" if "path" in why else "/v1/chat/completions"
        reader, writer = await begin(proxy, key, length, path=path)
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < FLOOD_BYTES:
                writer.write(b"x" * 65_536 if "content" in length else b"10000\r\n" + b"x" * 65_536 + b"\r\n")
                await writer.drain()
                sent += 65_536
        refusal = await answer
        writer.transport.abort()
    assert sent < FLOOD_BYTES
    assert refusal.startswith(b"HTTP/1.1 4")
    assert b"connection: close" in refusal.lower()


async def test_no_segment_waits_for_an_acknowledgement(proxy: RunningProxy, backend: Backend) -> None:
    """Nagle's algorithm and delayed acknowledgements together cost 40 ms a piece: it is off at both ends of a call."""
    backend.switches.gate = asyncio.Event()
    call = asyncio.create_task(proxy.chat(proxy.attempt()[1]))
    await backend.arrived.acquire()
    to_agents = [one for one, local, _ in _tcp_sockets() if local == proxy.parts.ports["http_port"]]
    to_backends = [one for one, _, peer in _tcp_sockets() if peer == backend.port]
    backend.switches.gate.set()
    await call
    assert to_agents
    assert to_backends
    assert all(to_agents + to_backends)


def _tcp_sockets() -> list[tuple[bool, int, int]]:
    """Returns, of each TCP connection of this process, whether Nagle's algorithm is off, its own port and its peer's."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            one = socket.socket(fileno=os.dup(int(descriptor.name)))
        except OSError:
            continue  # no socket, or closed since
        with one, contextlib.suppress(OSError):
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                off = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
                found.append((off, one.getsockname()[1], one.getpeername()[1]))
    return found
