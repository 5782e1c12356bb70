"""Streams with one response per request, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fulmen.errors import FulmenError

__all__ = ["answered_in_order"]

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


async def answered_in_order(
    requests: AsyncIterator[RequestT], answer: Callable[[RequestT], Awaitable[ResponseT]], *, in_flight: int
) -> AsyncIterator[ResponseT]:
    """Handles requests concurrently and yields the responses in request order.

    Args:
        requests: Client's stream; not read while `in_flight` responses are outstanding.
        answer: Handler of one request.
        in_flight: Maximum number of concurrent requests.

    Raises:
        FulmenError: From the first request that failed, or the client's stream; later requests are cancelled.
    """
    answers: asyncio.Queue[asyncio.Future[ResponseT] | None] = asyncio.Queue(in_flight)

    async def read() -> None:
        try:
            async for request in requests:
                await answers.put(asyncio.ensure_future(answer(request)))
        except FulmenError as error:
            failed: asyncio.Future[ResponseT] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            await answers.put(failed)
        await answers.put(None)

    reader = asyncio.create_task(read(), name="requests-in-order")
    try:
        while (one := await answers.get()) is not None:
            yield await one
    finally:
        reader.cancel()
        while not answers.empty():
            if (unanswered := answers.get_nowait()) is not None:
                unanswered.cancel()
