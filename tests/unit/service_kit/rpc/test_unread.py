"""The limit of messages that nobody takes, on a clock that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from fulmen.errors import DeadlineExceeded
from fulmen_service_kit.rpc.unread import UnreadLimit

LIMIT_S = 0.01


class Clock:
    """Stands still until it is set, and counts its readers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now_s

    async def looked_at(self, times: int) -> None:
        async with asyncio.timeout(30):
            while self.looks < times:  # noqa: ASYNC110  # a timer of the loop
                await asyncio.sleep(LIMIT_S)


class Source:
    """A stream that holds something until it is closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.clock = Clock()

    async def messages(self) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            self.closed.set()

    async def limited(self) -> UnreadLimit:
        messages = self.messages()
        await anext(messages)
        return UnreadLimit(messages, limit_s=LIMIT_S, clock=self.clock)


async def test_a_message_that_waits_too_long_closes_its_source_and_ends_its_stream() -> None:
    source = Source()
    limit = await source.limited()
    limit.offer()
    source.clock.now_s = LIMIT_S
    await asyncio.wait_for(source.closed.wait(), 30)
    with pytest.raises(DeadlineExceeded, match="stream_write_timeout_s"):
        limit.taken()


async def test_each_message_has_the_whole_time() -> None:
    source = Source()
    limit = await source.limited()
    limit.offer()
    for step in range(1, 6):
        source.clock.now_s = step * LIMIT_S * 0.9
        limit.taken()
        limit.offer()
        await source.clock.looked_at(source.clock.looks + 1)  # by the timer
    assert not source.closed.is_set()
    source.clock.now_s += LIMIT_S
    await asyncio.wait_for(source.closed.wait(), 30)
    limit.close()


async def test_a_stream_with_nothing_to_send_has_no_limit() -> None:
    source, idle = Source(), Source()
    watched, limit = await idle.limited(), await source.limited()
    watched.offer()
    watched.taken()
    idle.clock.now_s = 1000 * LIMIT_S
    limit.offer()
    source.clock.now_s = LIMIT_S
    # Its timer began after that of the idle stream.
    await asyncio.wait_for(source.closed.wait(), 30)
    assert not idle.closed.is_set()
    watched.offer()
    watched.taken()
    watched.close()
