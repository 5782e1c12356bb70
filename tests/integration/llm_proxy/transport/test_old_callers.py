"""Callers of HTTP/1.0, and those that close their half of the connection once they have asked."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.llm_proxy.rogue_backend import CHAT, MESSAGES, Peer, serve_well
from tests.support.llm_proxy.rogue_world import (
    DEADLINE_S,
    NATIVE,
    STREAMED,
    RogueWorld,
    answers_in,
    head_of,
    request_of,
    rogue_fixtures,
    sized,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared, world = rogue_fixtures()

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def asked(world: RogueWorld, path: str, model: str, *, stream: bool, version: bytes = b"1.1") -> bytes:
    body = json.dumps(request_of(path, model) | ({"stream": True} if stream else {})).encode()
    return head_of(path, world.key(), sized(body), version=version) + body


@pytest.mark.parametrize(("path", "model"), STREAMED)
async def test_a_stream_to_an_old_caller_is_its_events_alone_and_ends_with_the_connection(
    world: RogueWorld, path: str, model: str
) -> None:
    new = await world.post(path, request_of(path, model) | {"stream": True}, world.key())
    received = await world.exchange(asked(world, path, model, stream=True, version=b"1.0"))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert b"connection: close" in head.lower()
    # Ids and times of translated answers differ.
    assert body.count(b"data: ") == new.body.count(b"data: ") > 0
    assert body.endswith(new.body[-14:])


@pytest.mark.parametrize(("path", "model"), NATIVE.items())
async def test_an_old_caller_gets_whole_answers_with_their_length(world: RogueWorld, path: str, model: str) -> None:
    [answer] = answers_in(await world.exchange(asked(world, path, model, stream=False, version=b"1.0")))
    assert answer.status == 200
    json.loads(answer.body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_caller_that_has_closed_its_half_gets_its_answer(world: RogueWorld, path: str, stream: bool) -> None:
    asks = asyncio.Event()

    async def once_asked(peer: Peer) -> bool:
        await asks.wait()
        return await serve_well(peer)

    world.backend.act = once_asked
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(asked(world, path, NATIVE[path], stream=stream))
        writer.write_eof()
        # By this the proxy finds out whether it has left.
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        asks.set()
        answer = answers_in(await reader.read())[-1]
        writer.close()
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    if stream:
        assert answer.body.count(b"data: ") > 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_caller_that_closes_its_half_and_leaves_ends_the_backends_work(world: RogueWorld, stream: bool) -> None:
    over = asyncio.Event()

    async def waits(peer: Peer) -> bool:
        await peer.left()
        over.set()
        return False

    world.backend.act = waits
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(asked(world, CHAT, NATIVE[CHAT], stream=stream))
        writer.write_eof()
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        writer.transport.abort()
        await over.wait()


async def test_a_caller_that_closes_its_half_before_its_request_is_whole_gets_nothing(world: RogueWorld) -> None:
    before = len(world.backend.asked)
    request = asked(world, CHAT, NATIVE[CHAT], stream=False)
    assert await world.exchange(request[:-1], eof=True) == b""
    assert len(world.backend.asked) == before
