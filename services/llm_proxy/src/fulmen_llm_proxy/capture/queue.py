"""Finished calls that wait for the store.

Back-pressure: the queue is bounded in bytes. A call that is over is always taken, so that nothing
that was answered is lost; but while the queue is over its bound, new calls of attempts are refused
before they begin (503 with Retry-After). An agent then waits as long as the store is away, instead
of producing rollouts that nobody could train on. What may come on top of the bound is limited by
the number of calls in flight. With a spool on disk the queue fills up only when that is full or fails.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fulmen_llm_proxy.capture.finished_call import FinishedCall

_CROWDED_SHARE = 0.5
"""Of the bound: from here on calls go at once, and to the disk, if there is one, before any is refused."""

_DUE_CALLS = 32
"""So many calls go at once: more in one batch save little, and packing them would hold the event loop up."""


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
        """True while no new calls of attempts should begin."""
        return self._size_bytes >= self._max_bytes

    @property
    def size_bytes(self) -> int:
        """Memory that the waiting calls hold, about; includes those being sent."""
        return self._size_bytes

    @property
    def has_calls(self) -> bool:
        """True if there is something to take."""
        return bool(self._calls)

    def put(self, call: FinishedCall) -> None:
        """Adds a call; never waits, never refuses."""
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

    def hurry(self) -> None:
        """Makes what waits, or else what comes next, due at once: somebody waits for its delivery."""
        self._due.set()

    async def due(self) -> None:
        """Returns when what waits should not wait for more; the caller gives the deadline."""
        await self._due.wait()

    async def emptied(self) -> None:
        """Returns when nothing is left in memory; the caller gives the deadline."""
        self.hurry()
        await self._emptied.wait()

    async def filled(self) -> None:
        """Returns when there is something to take; the one who takes waits without a deadline."""
        await self._filled.wait()

    async def crowded(self) -> None:
        """Returns when more waits than memory should hold; the caller gives the deadline."""
        await self._crowded.wait()

    def take(self, *, max_calls: int, max_bytes: int) -> list[FinishedCall]:
        """Returns the oldest calls, at least one; there must be one.

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
        """Frees the space of calls that are with the store, or on disk."""
        self._size_bytes -= sum(call.size_bytes for call in calls)
        self._held -= len(calls)
        if self._size_bytes <= self._crowded_bytes:
            self._crowded.clear()
        if self._held == 0:
            self._emptied.set()
