"""Bodies that fit a socket's buffer are posted without aiohttp's detours, and arrive as by `ClientSession.post`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from fulmen_llm_proxy.backends.client import open_session
from fulmen_llm_proxy.backends.prompt_post import MAX_AT_ONCE_BYTES, PromptPost

LIMIT_S = 20


class World:
    """A server that notes what it is sent, and a session with its own posts."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seen: list[tuple[dict[str, str], bytes]]) -> None:
        self.session, self.url, self.seen = session, url, seen
        self.posts = PromptPost(session)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    seen: list[tuple[dict[str, str], bytes]] = []

    async def note(request: web.Request) -> web.Response:
        if request.path == "/away":
            raise web.HTTPFound("/elsewhere")
        if request.path == "/gone":
            assert request.transport is not None
            request.transport.abort()
        seen.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        return web.Response(body=b"answer", headers={"set-cookie": "a=b"})

    app = web.Application(client_max_size=2**24)
    app.router.add_route("POST", "/{path:.*}", note)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with asyncio.timeout(LIMIT_S), open_session(connect_timeout_s=1, first_byte_timeout_s=2) as session:
        yield World(session, f"http://127.0.0.1:{port}", seen)
    await runner.cleanup()


@pytest.mark.parametrize("size", [0, 1, MAX_AT_ONCE_BYTES, MAX_AT_ONCE_BYTES + 1, 2**20])
async def test_a_body_arrives_as_by_the_session(world: World, size: int) -> None:
    body, headers = b"x" * size, {"Authorization": "Bearer key", "traceparent": "00-1-2-01"}
    for _ in range(2):
        async with await world.posts.post(f"{world.url}/v1/chat?a=b%20c", body, headers) as response:
            assert (response.status, await response.read()) == (200, b"answer")
    async with world.session.post(f"{world.url}/v1/chat?a=b%20c", data=body, headers=headers) as response:
        await response.read()
    first, second, by_session = world.seen
    assert first == second == by_session


async def test_answers_use_one_connection_after_the_other(world: World) -> None:
    for _ in range(3):
        async with await world.posts.post(f"{world.url}/v1", b"{}", {}) as response:
            await response.read()
    connector = world.session.connector
    assert connector is not None
    assert sum(map(len, connector._conns.values())) == 1


async def test_a_redirect_is_an_answer(world: World) -> None:
    async with await world.posts.post(f"{world.url}/away", b"{}", {}) as response:
        assert response.status == 302
    assert not world.seen


async def test_credentials_in_an_address_are_sent_as_the_session_does(world: World) -> None:
    address = world.url.replace("//", "//user:word@")
    async with await world.posts.post(f"{address}/v1", b"{}", {}) as response:
        await response.read()
    assert world.seen[0][0]["authorization"].startswith("Basic ")


@pytest.mark.parametrize("header", ["a\r\nb: c", "a\nb"])
async def test_a_header_with_a_line_of_its_own_is_not_sent(world: World, header: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)header|newline|line"):
        await world.posts.post(f"{world.url}/v1", b"{}", {"x-own": header})
    assert not world.seen


async def test_a_connection_that_breaks_is_an_error_of_the_client_and_no_connection_is_kept(world: World) -> None:
    with pytest.raises(aiohttp.ClientError):
        await world.posts.post(f"{world.url}/gone", b"{}", {})
    connector = world.session.connector
    assert connector is not None
    assert not connector._acquired


async def test_a_backend_that_cannot_be_reached_is_told_apart(world: World) -> None:
    with pytest.raises(aiohttp.ClientConnectorError):
        await world.posts.post("http://127.0.0.1:1/v1", b"{}", {})


async def test_a_cancelled_call_keeps_no_connection(world: World) -> None:
    left = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads until the caller has left, and says nothing."""
        await reader.read()
        writer.close()
        left.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await world.posts.post(f"http://127.0.0.1:{port}/v1", b"{}", {})
    connector = world.session.connector
    assert connector is not None
    assert not connector._acquired
    async with asyncio.timeout(LIMIT_S):
        await left.wait()
    server.close()
    await server.wait_closed()
