"""A member that joined a run over a stream: it exists as long as the stream."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Order = TypeVar("Order")


class JoinedStream(Generic[Order]):
    """The service's end of such a stream."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` only grows, seconds."""
        self._clock = clock
        self._heard_s = clock()
        self._orders: asyncio.Queue[Order | None] = asyncio.Queue()
        self._gone = asyncio.Event()

    @property
    def silent_s(self) -> float:
        """Time since the last message, seconds."""
        return self._clock() - self._heard_s

    @property
    def has_left(self) -> bool:
        """Whether the stream has ended."""
        return self._gone.is_set()

    async def left(self) -> None:
        """Waits until the stream has ended."""
        await self._gone.wait()

    def heard(self) -> None:
        """Notes a message."""
        self._heard_s = self._clock()

    def tell(self, order: Order) -> None:
        """Sends a message."""
        self._orders.put_nowait(order)

    async def next_order(self) -> Order | None:
        """Waits for the next message to send; None at the end."""
        return await self._orders.get()

    def leave(self) -> None:
        """Ends the stream from either side; idempotent."""
        if not self._gone.is_set():
            self._gone.set()
            self._orders.put_nowait(None)
