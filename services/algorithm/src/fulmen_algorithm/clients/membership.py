"""The part of a program that belongs to one run by a stream: it joins, and joins again, until the run has ended."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import structlog

from fulmen.errors import DeadlineExceeded, EngineExists, TrainingRunStateInvalid, Unavailable

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 10.0
# Another stream of this program may not have been noticed to be broken yet.
AGAIN: Final = (Unavailable, DeadlineExceeded, EngineExists)
Message = TypeVar("Message")
_log = structlog.get_logger()


class Membership:
    """Joins again.

    Attributes:
        run_ended: Set when the run has ended.
    """

    def __init__(self, *, outage_limit_s: float) -> None:
        """`outage_limit_s` is the time without the algorithm service after which the program ends, in seconds."""
        self.run_ended = asyncio.Event()
        self._outage_limit_s = outage_limit_s
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        """Notes a message of the service."""
        self._heard_s = time.monotonic()

    async def keep(self, join: Callable[[], Awaitable[None]]) -> None:
        """Joins until the run has ended, and then waits to be cancelled; `join` returns or raises when a stream has ended.

        Raises:
            FulmenError: if the service refuses the program, or is away for too long.
        """
        wait_s = FIRST_WAIT_S
        while True:
            joined_s = self._heard_s
            try:
                await join()
            except TrainingRunStateInvalid as error:
                _log.info("run_ended", reason=error.message)
                self.run_ended.set()
                await asyncio.Event().wait()  # a role that returns has failed
            except AGAIN as error:
                if time.monotonic() - self._heard_s > self._outage_limit_s:
                    raise
                _log.info("stream_ended", reason=error.message)
            wait_s = FIRST_WAIT_S if self._heard_s > joined_s else min(2 * wait_s, LONGEST_WAIT_S)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))


async def each(queue: "asyncio.Queue[Message | None]") -> AsyncIterator[Message]:
    """Yields what is put into a queue, until None is."""
    while (message := await queue.get()) is not None:
        yield message
