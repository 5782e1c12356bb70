"""Streams whose callers stop reading: what they hold is given back, and they end."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fulmen.errors import DeadlineExceeded


class UnreadLimit:
    """Closes the source of a stream once its caller has taken no message for a time. A message that waits must be there.

    A message that was passed to gRPC cannot be withdrawn, and only the caller can close the stream: until it takes the
    message or leaves, the stream keeps that message and counts among those of its project, and holds nothing else.
    """

    __slots__ = ("_clock", "_is_over", "_limit_s", "_since_s", "_source", "_timer")

    def __init__(
        self, source: AsyncGenerator[Any, Any], *, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Initializes the limit; `limit_s` is the time for which a message may wait, in seconds."""
        self._source = source
        self._limit_s = limit_s
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._since_s: float | None = None
        self._is_over = False

    def offer(self) -> None:
        """Starts the wait of a message."""
        self._since_s = self._clock()
        if self._timer is None:
            self._look_in(self._limit_s)

    def taken(self) -> None:
        """Ends the wait.

        Raises:
            DeadlineExceeded: If it was too long.
        """
        self._since_s = None
        if self._is_over:
            raise DeadlineExceeded(f"The caller read no message for {self._limit_s:g} s (stream_write_timeout_s).")

    def close(self) -> None:
        """Stops looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, seconds: float) -> None:
        # One timer for many messages: a stream of small ones pays for the time alone.
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._since_s is None:
            return
        left_s = self._limit_s - (self._clock() - self._since_s)
        if left_s > 0:
            self._look_in(left_s)
            return
        self._is_over = True
        closing = asyncio.get_running_loop().create_task(self._source.aclose(), name="unread-stream")
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()
