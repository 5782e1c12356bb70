"""Answers that wait to be fetched: `retrieve_future` of the `tinker` package. Bounded in number, bytes and time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from fulmen.errors import FulmenError, InternalError, NotFound, QuotaExceeded

__all__ = ["Answered", "Future", "Futures"]

MAX_FUTURES: Final = 8192
"""Of a project, those that are not fetched included."""
MAX_BYTES: Final = 256 * 2**20
"""Of all requests that are carried out and all answers that are kept. One project may hold as much as it leaves free."""
KEEP_S: Final = 900.0
"""Time for which an answer is kept."""
KEEP_FETCHED_S: Final = 60.0
"""The same after it was fetched: the connection may have broken meanwhile."""
RETRY_S: Final = 1.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: its body and content type."""

    body: bytes
    content_type: bytes


class Future:
    """What becomes of one call."""

    def __init__(self, future_id: str, project: str, size_bytes: int) -> None:
        self.id = future_id
        self.project = project
        self.size_bytes = size_bytes
        self.answer: Answered | None = None
        self.error: FulmenError | None = None
        self.done = asyncio.Event()
        self.ends_s = float("inf")
        self.task: asyncio.Task[Answered] | None = None


class Futures:
    """All calls whose answers are not fetched. Thread: the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._futures: dict[str, Future] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def held_bytes(self) -> int:
        """Bytes of requests and answers."""
        return self._bytes

    def begin(
        self, future_id: str, project: str, work: Callable[[], Awaitable[Answered]], *, size_bytes: int = 0
    ) -> Future:
        """Begins a call in the background; one that has begun under this id is returned instead.

        Args:
            future_id: Names the call; the same for a request that is sent again.
            project: Whose it is.
            work: Carries it out.
            size_bytes: Size of the request.

        Raises:
            QuotaExceeded: if there are too many.
        """
        self.sweep()
        known = self._futures.get(future_id)
        if known is not None:
            if known.project != project:
                raise _unknown()
            return known
        if sum(each.project == project for each in self._futures.values()) >= MAX_FUTURES:
            raise QuotaExceeded("Too many answers are waiting to be fetched.", quota="futures", retry_after_s=RETRY_S)
        if not self._has_room(project, size_bytes):
            raise QuotaExceeded(
                "The console has no capacity for the request.", quota="future_bytes", retry_after_s=RETRY_S
            )
        future = Future(future_id, project, size_bytes)
        self._futures[future_id] = future
        self._bytes += size_bytes

        async def carried_out() -> Answered:
            return await work()

        future.task = asyncio.create_task(carried_out(), name=f"tinker {future_id}")
        # Not in the task: one that is cancelled before it begins runs nothing of itself.
        future.task.add_done_callback(partial(self._ended, future))
        return future

    def _has_room(self, project: str, size_bytes: int) -> bool:
        """Returns whether a project may hold so much more.

        One project fills half of it at most, two a third each, and there is always room for another one.
        """
        own = sum(each.size_bytes for each in self._futures.values() if each.project == project)
        return own + size_bytes <= MAX_BYTES - self._bytes - size_bytes

    def find(self, future_id: str, project: str) -> Future:
        """Returns a call. Raises NotFound if it is unknown, expired or another project's."""
        self.sweep()
        future = self._futures.get(future_id)
        if future is None or future.project != project:
            raise _unknown()
        return future

    def fetched(self, future: Future) -> None:
        """Notes that a call's answer was fetched."""
        future.ends_s = min(future.ends_s, self._clock() + KEEP_FETCHED_S)

    def cancel(self, future_id: str, project: str) -> None:
        """Stops a call that no one waits for; does nothing if there is none."""
        future = self._futures.get(future_id)
        if future is not None and future.project == project and future.task is not None:
            future.task.cancel()

    def sweep(self) -> None:
        """Drops answers that were not fetched in time."""
        now = self._clock()
        for future in [each for each in self._futures.values() if each.ends_s <= now]:
            del self._futures[future.id]
            self._bytes -= future.size_bytes

    async def close(self) -> None:
        """Stops all calls."""
        tasks = [each.task for each in self._futures.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, future: Future, task: asyncio.Task[Answered]) -> None:
        error = InternalError("The call was cancelled.") if task.cancelled() else task.exception()
        if error is None:
            future.answer = task.result()
        elif isinstance(error, FulmenError):
            future.error = error
        else:
            _log.error("tinker_call_failed", call=future.id, exc_info=error)
            future.error = InternalError("The console failed; see its log.")
        # It would keep what it has returned.
        future.task = None
        self._bytes -= future.size_bytes
        future.size_bytes = 0
        if future.answer is not None:
            if self._has_room(future.project, len(future.answer.body)):
                future.size_bytes = len(future.answer.body)
                self._bytes += future.size_bytes
            else:
                text = "The console has no capacity for the answer: fetch answers before you request more."
                future.answer, future.error = None, QuotaExceeded(text, quota="future_bytes")
        future.ends_s = self._clock() + KEEP_S
        future.done.set()


def _unknown() -> NotFound:
    return NotFound("The call does not exist: its answer was not fetched in time, or the console was restarted.")
