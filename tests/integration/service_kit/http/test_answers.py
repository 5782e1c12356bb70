"""A complete answer is written at once, and all others as uvicorn writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fulmen_service_kit.http.answers import OneWrite
from fulmen_service_kit.http.server import HttpServer, bind
from fulmen_service_kit.http.wire import Header, Receive, Scope, Send, respond

LIMIT_S = 20
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Says:
    """Answers with the same bytes and headers."""

    draining = False

    def __init__(self, body: bytes, headers: Sequence[Header] = (), *, pieces: bool = False) -> None:
        self.body, self.headers, self.pieces = body, headers, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if not self.pieces:
            await respond(send, 200, self.body, b"text/plain", self.headers)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [*self.headers]})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serving(app: Says) -> AsyncIterator[int]:
    """Yields the port of a server."""
    server = HttpServer(app=app, listener=bind("127.0.0.1", 0), grace_s=1)
    task = asyncio.create_task(server.run())
    yield server.port
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()


async def answers(app: Says, request: bytes) -> bytes:
    """Sends a request and then one whose answer ends the connection; returns both answers."""
    last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with asyncio.timeout(LIMIT_S), serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + last)
        found = await reader.read()
        writer.close()
        return found


@pytest.mark.parametrize("size", [0, 1, 40_000])
async def test_a_whole_answer_has_its_head_body_and_successor(size: int) -> None:
    body = b"y" * size
    first, second = (await answers(Says(body, [(b"x-own", b"a b")]), GET)).split(b"HTTP/1.1 200 OK\r\n")[1:]
    head, _, rest = first.partition(b"\r\n\r\n")
    assert {b"content-type: text/plain", b"content-length: %d" % size, b"x-own: a b"} <= {*head.split(b"\r\n")}
    assert rest == body
    assert b"connection: close" in second
    assert second.endswith(b"\r\n\r\n" + body)


async def test_an_answer_to_head_has_no_body() -> None:
    found = await answers(Says(b"body"), GET.replace(b"GET", b"HEAD"))
    assert found.count(b"content-length: 4") == 2
    assert found.count(b"body") == 1


async def test_an_answer_in_pieces_is_chunked() -> None:
    found = await answers(Says(b"piece", pieces=True), GET)
    assert found.count(b"transfer-encoding: chunked") == 2
    assert found.count(b"5\r\npiece\r\n0\r\n\r\n") == 2


@pytest.mark.parametrize("bad", [(b"a b", b"1"), (b"a", b"1\r\nx: 2"), (b"a", b"\0")])
async def test_a_header_that_would_break_the_answer_is_never_written(bad: Header) -> None:
    found = await answers(Says(b"body", [bad]), GET)
    assert b"x: 2" not in found
    assert b"\0" not in found
    assert b"200 OK" not in found or b"\r\n\r\nbody" not in found


async def test_head_and_body_are_one_write() -> None:
    written: list[bytes] = []
    cycle: Any = SimpleNamespace(
        response_started=False,
        response_complete=False,
        disconnected=False,
        keep_alive=True,
        waiting_for_100_continue=True,
        flow=SimpleNamespace(write_paused=False),
        scope={"method": "GET"},
        default_headers=[(b"date", b"today")],
        transport=SimpleNamespace(write=written.append),
        message_event=asyncio.Event(),
        on_response=lambda: written.append(b"done"),
    )
    await OneWrite(cycle, Says(b"body"))({}, None, None)  # type: ignore[arg-type]
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\n"
    assert written == [head + b"body", b"done"]
    assert cycle.response_complete
