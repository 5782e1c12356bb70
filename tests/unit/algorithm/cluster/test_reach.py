"""Machines ask each other whether they reach each other."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from fulmen_algorithm.cluster.reach import ASKED, Answering, until_unreached

HOST = "127.0.0.1"
LIMIT_S = 0.5
DEADLINE_S = 30.0


async def test_a_machine_that_answers_is_reached_and_one_that_ended_is_not():
    answers = await Answering.at(HOST)
    # A busy machine may stand still for as long as the others' limit.
    asking = asyncio.create_task(until_unreached(HOST, answers.port, limit_s=4 * LIMIT_S))
    done, _ = await asyncio.wait({asking}, timeout=5 * LIMIT_S)
    assert not done
    answers.close()
    async with asyncio.timeout(DEADLINE_S):
        await asking


async def test_a_machine_that_accepts_and_never_answers_is_not_reached():
    left = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    async with await asyncio.start_server(say_nothing, HOST, 0) as server:
        async with asyncio.timeout(DEADLINE_S):
            await until_unreached(HOST, server.sockets[0].getsockname()[1], limit_s=LIMIT_S)
            await left.wait()


async def test_only_so_many_may_ask(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fulmen_algorithm.cluster.reach.MAX_ASKERS", 1)
    answers = await Answering.at(HOST)
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(HOST, answers.port)
        writer.write(ASKED)
        assert await reader.readexactly(1) == ASKED
        other, closing = await asyncio.open_connection(HOST, answers.port)
        with suppress(ConnectionError):
            assert await other.read() == b""
        answers.close()
        with suppress(ConnectionError):
            assert await reader.read() == b""
        for each in (closing, writer):
            each.close()
            with suppress(ConnectionError):
                await each.wait_closed()
