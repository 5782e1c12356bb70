"""Reads of streams, which are not cancelled with their rpc."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest

from fulmen_service_kit.rpc.reads import Read, abandoned


class Source:
    """A stream with one message, or an error."""

    def __init__(self) -> None:
        self.message: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def read(self) -> Awaitable[str]:
        return anext(self._messages())

    async def _messages(self) -> AsyncIterator[str]:
        await asyncio.sleep(0)  # a step without a future
        text = await self.message
        if text:
            yield text


async def waiting_for(source: Source) -> asyncio.Task[str]:
    async def wait() -> str:
        return await Read(source.read())

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_a_read_returns_its_message_or_raises_what_ends_it() -> None:
    for end, result in (("text", "text"), (ValueError("broken"), ValueError), ("", StopAsyncIteration)):
        source = Source()
        reading = await waiting_for(source)
        if isinstance(end, Exception):
            source.message.set_exception(end)
        else:
            source.message.set_result(end)
        await asyncio.wait([reading])
        if isinstance(result, str):
            assert reading.result() == result
        else:
            assert isinstance(reading.exception(), result)


async def test_a_cancelled_read_ends_by_itself_and_its_message_is_dropped() -> None:
    source = Source()
    reading = await waiting_for(source)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    (rest,) = abandoned
    assert not source.message.cancelled()
    source.message.set_result("late")
    assert await rest == "late"
    assert not abandoned


async def test_a_read_that_was_left_is_cancelled_with_the_loop() -> None:
    source = Source()
    reading = await waiting_for(source)
    reading.cancel()
    await asyncio.wait([reading])
    (rest,) = abandoned
    await asyncio.sleep(0)
    rest.cancel()
    await asyncio.wait([rest])
    assert rest.cancelled()
    assert source.message.cancelled()
    assert not abandoned
