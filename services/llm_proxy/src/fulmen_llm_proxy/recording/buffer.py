"""The finished calls of apps that wait for delivery. Bounded in bytes: a call that does not fit is dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from fulmen_llm_proxy.metrics.recording import RecordingMetrics
from fulmen_llm_proxy.recording.app_call import AppCall

MAX_CALL_BYTES = 4 * 1024 * 1024
"""Largest request and answer that are looked at, bytes; of a stream each event counts whole."""
_LAST_CALLS_S = 5.0
TOO_LARGE, BUFFER_FULL = "too_large", "buffer_full"


class RecordingBuffer:
    """Holds calls; one event loop owns it."""

    def __init__(self, *, max_bytes: int, metrics: RecordingMetrics) -> None:
        self._max_bytes = max_bytes
        self.metrics = metrics
        self._calls: deque[AppCall] = deque()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._size_bytes = 0
        metrics.buffer_bytes.set_function(lambda: self._size_bytes)

    @property
    def count(self) -> int:
        """Number of calls to take."""
        return len(self._calls)

    def offer(self, call: AppCall) -> None:
        """Adds a call, or drops and counts it; never blocks."""
        if call.size_bytes > MAX_CALL_BYTES:
            self.metrics.dropped(TOO_LARGE)
        elif self._size_bytes + call.size_bytes > self._max_bytes:
            self.metrics.dropped(BUFFER_FULL)
        else:
            self._calls.append(call)
            self._size_bytes += call.size_bytes
            self._filled.set()
            self._emptied.clear()

    async def filled(self) -> None:
        """Waits until there is a call, without a deadline."""
        await self._filled.wait()

    async def settled(self) -> None:
        """Waits a few seconds until every call is delivered or dropped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_CALLS_S):
                await self._emptied.wait()

    def take(self, count: int) -> list[AppCall]:
        """Takes the oldest calls; their memory counts until `release`."""
        taken = [self._calls.popleft() for _ in range(min(count, len(self._calls)))]
        if not self._calls:
            self._filled.clear()
        return taken

    def release(self, calls: list[AppCall]) -> None:
        """Releases the memory of calls."""
        self._size_bytes -= sum(call.size_bytes for call in calls)
        if not self._size_bytes and not self._calls:
            self._emptied.set()
