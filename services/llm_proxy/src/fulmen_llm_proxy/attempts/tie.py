"""One call's tie to its attempt: when the attempt ends, so does the call."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from fulmen_llm_proxy.attempts.guard import AttemptGuard, Use, attempt_over
from fulmen_llm_proxy.capture.finished_call import Attribution
from fulmen_service_kit.http_wire import CallerGone


class AttemptTie:
    """Raises AttemptOver in its block as soon as the attempt is found over.

    Its protocol is that of `asyncio.timeout`: only a cancellation that is its own becomes an error.
    """

    __slots__ = ("_before", "_interrupted", "_task", "_use")

    def __init__(self, guard: AttemptGuard, attribution: Attribution) -> None:
        """Ties the call that runs in this task to its attempt.

        Raises:
            AttemptOver: if the attempt is over already.
        """
        self._interrupted = False
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()
        self._use: Use = guard.enter(attribution, self)

    def interrupt(self) -> None:
        """Ends the call."""
        if self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    def __enter__(self) -> AttemptTie:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._use.calls.discard(self)
        if not self._interrupted or self._task is None:
            return
        mine = self._task.uncancel() <= self._before
        # Over gRPC the watch for the caller's leaving cannot tell whose cancellation it sees, and takes it for its own.
        if mine and kind in (asyncio.CancelledError, CallerGone):
            raise attempt_over(self._use.attribution.attempt, self._use.verdict) from error
