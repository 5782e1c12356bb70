"""The queue of finished calls that wait for delivery to the store.

Back-pressure: the queue is bounded in bytes. A finished call is always accepted, so no answered call is lost. While
the queue is full, new calls of attempts are refused (503 with Retry-After): an agent waits while the store is
unavailable, instead of producing rollouts that could not be trained on. The number of calls in flight limits the
excess over the bound. With a spool the queue fills up only if the spool is full or its disk fails.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fulmen_llm_proxy.capture.finished_call import FinishedCall

_CROWDED_SHARE = 0.5
"""Share of the bound above which calls are delivered immediately, or spooled, before new ones are refused."""

_DUE_CALLS = 32
"""Batch size at which calls are due; larger batches save little, and packing them would block the event loop."""


class CaptureQueue:
    """A queue of finished calls, bounded in bytes; one event loop owns it."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._calls: deque[FinishedCall] = deque()
        self._size_bytes = 0
        self._filled = asyncio.Event()
        self._held = 0
        self._crowded = asyncio.Event()
        self._crowded_bytes = int(max_bytes * _CROWDED_SHARE)
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._due = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether new calls of attempts must be refused."""
        return self._size_bytes >= self._max_bytes

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the waiting calls, including those being sent."""
        return self._size_bytes

    @property
    def has_calls(self) -> bool:
        """Whether calls are waiting."""
        return bool(self._calls)

    def put(self, call: FinishedCall) -> None:
        """Adds a call; never blocks or refuses."""
        self._calls.append(call)
        self._size_bytes += call.size_bytes
        self._held += 1
        self._filled.set()
        self._emptied.clear()
        if self._size_bytes > self._crowded_bytes:
            self._crowded.set()
            self._due.set()
        if len(self._calls) >= _DUE_CALLS:
            self._due.set()

    def flush_soon(self) -> None:
        """Makes the waiting calls, or the next one, due immediately, because a flush waits for them."""
        self._due.set()

    async def due(self) -> None:
        """Waits until a batch should be sent. The caller sets the deadline."""
        await self._due.wait()

    async def emptied(self) -> None:
        """Waits until no call is left in memory. The caller sets the deadline."""
        self.flush_soon()
        await self._emptied.wait()

    async def filled(self) -> None:
        """Waits until there is a call to take, without a deadline."""
        await self._filled.wait()

    async def crowded(self) -> None:
        """Waits until the queue is crowded. The caller sets the deadline."""
        await self._crowded.wait()

    def take(self, *, max_calls: int, max_bytes: int) -> list[FinishedCall]:
        """Takes the oldest calls, at least one; the queue must not be empty.

        They count against the bound until `release`.
        """
        taken = [self._calls.popleft()]
        size_bytes = taken[0].size_bytes
        while self._calls and len(taken) < max_calls:
            size_bytes += self._calls[0].size_bytes
            if size_bytes > max_bytes:
                break
            taken.append(self._calls.popleft())
        if not self._calls:
            self._filled.clear()
        if len(self._calls) < _DUE_CALLS and self._size_bytes <= self._crowded_bytes:
            self._due.clear()
        return taken

    def release(self, calls: list[FinishedCall]) -> None:
        """Releases the memory of calls that the store has, or that are on disk."""
        self._size_bytes -= sum(call.size_bytes for call in calls)
        self._held -= len(calls)
        if self._size_bytes <= self._crowded_bytes:
            self._crowded.clear()
        if self._held == 0:
            self._emptied.set()
