"""What the streams of machines that join a run have in common, on the service's side."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

from fulmen.errors import DeadlineExceeded, Draining, Unavailable
from fulmen_algorithm.clients.joined_stream import JoinedStream
from fulmen_algorithm.engines.supervisor import LONGEST_LEAVE_S

OPEN_TIMEOUT_S: Final = 10.0
LEAVE_LIMIT_S: Final = LONGEST_LEAVE_S + 10.0
"""Time for which what leaves may end its calls, and that the changes at the proxy take, in seconds."""
Message = TypeVar("Message")
Order = TypeVar("Order")


async def opening(requests: AsyncIterator[Message], empty: Message) -> Message:
    """Returns the first message of a stream; `empty` of one that has ended.

    Raises:
        DeadlineExceeded: if it does not come in time.
    """
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            return await anext(aiter(requests), empty)
    except TimeoutError:
        raise DeadlineExceeded(f"The stream was not opened within {OPEN_TIMEOUT_S:.0f} s.") from None


async def again(first: Message, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    """Puts a message that was read back before the rest."""
    yield first
    async for request in requests:
        yield request


class JoinStreams:
    """The open streams of one rpc, until the service drains."""

    def __init__(self) -> None:
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Ends them; their machines join again when the service is back."""
        self._draining.set()

    def require_open(self) -> None:
        """Checks that the service does not drain.

        Raises:
            Draining: if it does.
        """
        if self._draining.is_set():
            raise Draining("The service is shutting down.")

    async def kept(
        self,
        joined: JoinedStream[Order],
        *,
        serving: Coroutine[Any, Any, None],
        reading: Coroutine[Any, Any, None],
        silence_limit_s: float,
    ) -> AsyncGenerator[Order]:
        """Yields messages to a machine, until it leaves.

        Args:
            joined: The stream.
            serving: What the machine is used for; ended first.
            reading: Takes its messages.
            silence_limit_s: Time without a message after which it is lost, in seconds.

        Raises:
            Unavailable: if it sent nothing for too long.
            Draining: if the service drains.
        """
        ends = [
            asyncio.create_task(serving, name="joined-serves"),
            asyncio.create_task(reading, name="joined-stream"),
            asyncio.create_task(_until_silent(joined, silence_limit_s), name="joined-silence"),
            asyncio.create_task(self._until_drained(), name="joined-drain"),
        ]

        def ended(end: "asyncio.Task[None]") -> None:
            joined.leave()
            if not end.cancelled():
                end.exception()  # the error of a stream that its caller has ended is never read

        for end in ends:
            end.add_done_callback(ended)
        try:
            while (order := await joined.next_order()) is not None:
                yield order
        finally:
            joined.leave()
            # Unused before the stream ends. A reader ends with its rpc.
            await asyncio.wait(ends[:1], timeout=LEAVE_LIMIT_S)
            for end in (ends[0], *ends[2:]):
                end.cancel()
        for end in ends:
            if end.done() and not end.cancelled() and (error := end.exception()) is not None:
                raise error

    async def _until_drained(self) -> None:
        await self._draining.wait()
        self.require_open()


async def _until_silent(joined: JoinedStream[Any], limit_s: float) -> None:
    while joined.silent_s < limit_s:  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(limit_s - joined.silent_s)
    raise Unavailable(f"No message arrived for {limit_s:.0f} s: join again.")
