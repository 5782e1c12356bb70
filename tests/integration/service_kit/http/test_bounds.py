"""The head of a request has bounds, whatever its sender does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from fulmen_service_kit.http import server as http_server
from fulmen_service_kit.http.server import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES, HttpServer, bind
from fulmen_service_kit.http.wire import Receive, Scope, Send, read_body, respond

LIMIT_S = 20
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"


class Echo:
    """Answers with the size of the body."""

    draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        body = await read_body(scope, receive, 10_000_000)
        await respond(send, 200, b"%d" % len(body))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Yields the port of a server."""
    server = HttpServer(app=Echo(), listener=bind("127.0.0.1", 0), grace_s=1)
    task = asyncio.create_task(server.run())
    yield server.port
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()


async def answer_to(port: int, *pieces: bytes) -> bytes:
    """Sends pieces, each when the one before is on its way, and reads to the end."""
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.read()
        writer.close()
        return answer


def refusal(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "pieces",
    [
        (GET, b"a: " + b"x" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n"),
        (GET, *[b"a: " + b"x" * 1000 + b"\r\n"] * 70, b"\r\n"),
        (GET, b"".join(b"h%d: x\r\n" % number for number in range(MAX_HEADERS + 1)), b"\r\n"),
        (GET, b"endless: ", *[b"x" * 10_000] * 40),
    ],
)
async def test_headers_over_the_bounds_are_answered_431(port: int, pieces: tuple[bytes, ...]) -> None:
    assert refusal(await answer_to(port, *pieces)) == (431, "headers_too_large")


async def test_a_url_over_the_bound_is_answered_414(port: int) -> None:
    url = b"/" + b"x" * MAX_URL_BYTES
    assert refusal(await answer_to(port, b"GET " + url + b" HTTP/1.1\r\nhost: x\r\n\r\n")) == (414, "url_too_long")


async def test_what_is_within_the_bounds_is_answered_whatever_the_size_of_its_body(port: int) -> None:
    headers = b"".join(b"h%d: " % number + b"x" * 400 + b"\r\n" for number in range(MAX_HEADERS - 3))
    body = b"y" * 5 * MAX_HEAD_BYTES
    post = b"POST / HTTP/1.1\r\nhost: x\r\n" + headers + b"content-length: %d\r\n" % len(body)
    first = post + b"\r\n" + body
    last = post + b"connection: close\r\n\r\n" + body
    answer = await answer_to(port, first + first, last)
    assert answer.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("pieces", [(), (b"GET / HT",), (GET + b"\r\n", b"GET / HT"), (GET + b"a: b",)])
async def test_a_head_that_does_not_arrive_is_given_up(
    port: int, pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_LIMIT_S", 0.05)
    answer = await answer_to(port, *pieces)
    assert refusal(answer[answer.index(b"HTTP/1.1 408") :]) == (408, "request_timeout")


async def test_what_is_no_http_is_answered_400(port: int) -> None:
    assert (await answer_to(port, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
