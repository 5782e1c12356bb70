"""Decides which attempts may still call models, by their last known status.

Invariant: an attempt that has ended is refused until its key expires; an attempt of unknown status is admitted. An
attempt without recent calls is forgotten and no longer polled. One event loop owns the guard.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Final

from fulmen.errors import AttemptOver
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_service_kit.http.wire import CallerGone

MAX_REFUSED: Final = 100_000
"""Maximum number of refused attempts kept; those whose keys expire first are dropped first."""


class AttemptState(StrEnum):
    """State of an attempt."""

    LIVE = "live"
    ENDED = "ended"
    STALE_EPOCH = "stale_epoch"
    CANCEL_REQUESTED = "cancel_requested"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """Status of an attempt in the store, and what it belongs to, which is empty if it was not found."""

    state: AttemptState
    project: str = ""
    mode: str = ""
    training_run: str = ""
    agent: str = ""


@dataclass(slots=True, eq=False)
class TrackedAttempt:
    """An attempt that calls, or is refused.

    Attributes:
        called: whether it has called since the last poll.
        calls: its running calls.
    """

    attribution: Attribution
    state: AttemptState = AttemptState.LIVE
    called: bool = True
    calls: set[AttemptTie] = field(default_factory=set)


_Key = tuple[str, int, str]

_WHY: Final = {
    AttemptState.ENDED: "The attempt has ended; its key is no longer valid.",
    AttemptState.STALE_EPOCH: "A newer attempt of the rollout is running; the key of this one is no longer valid.",
    AttemptState.CANCEL_REQUESTED: "The rollout was cancelled; the attempt should stop.",
    AttemptState.NOT_FOUND: "Attempt not found; its key is not valid.",
}


def _key(attribution: Attribution) -> _Key:
    # Includes the project, so that a false claim in one key cannot harm another.
    return attribution.attempt, attribution.epoch, attribution.project


def attempt_over(attempt: str, state: AttemptState) -> AttemptOver:
    """Returns the error of an attempt that is not LIVE."""
    return AttemptOver(_WHY[state], attempt=attempt, why=state.value)


class AttemptGuard:
    """Refuses the calls of ended attempts, and cancels those that run."""

    def __init__(self, *, clock: Callable[[], float], max_refused: int = MAX_REFUSED) -> None:
        """Creates a guard without attempts.

        Args:
            clock: the store's time, Unix seconds.
            max_refused: maximum number of refused attempts kept.
        """
        self._clock = clock
        self._max_refused = max_refused
        self._tracked: dict[_Key, TrackedAttempt] = {}
        self._active: dict[_Key, TrackedAttempt] = {}
        # A heap by expiry; each entry is also in `_tracked`.
        self._refused: list[tuple[float, _Key]] = []
        self._busy = asyncio.Event()

    def enter(self, attribution: Attribution, call: AttemptTie) -> TrackedAttempt:
        """Registers a call of an attempt; the call removes itself from `calls` at its end.

        Raises:
            AttemptOver: if the attempt has ended.
        """
        key = _key(attribution)
        tracked = self._tracked.get(key)
        if tracked is None:
            tracked = self._tracked[key] = self._active[key] = TrackedAttempt(attribution)
            self._busy.set()
        elif tracked.state is not AttemptState.LIVE:
            raise attempt_over(attribution.attempt, tracked.state)
        tracked.called = True
        tracked.calls.add(call)
        return tracked

    def require(self, attribution: Attribution) -> None:
        """Checks that an attempt may call.

        Raises:
            AttemptOver: if it has ended.
        """
        tracked = self._tracked.get(_key(attribution))
        if tracked is not None and tracked.state is not AttemptState.LIVE:
            raise attempt_over(attribution.attempt, tracked.state)

    async def busy(self) -> None:
        """Waits until there is an attempt to poll. The caller sets the deadline."""
        await self._busy.wait()

    def pending_checks(self) -> list[Attribution]:
        """Returns the attempts that have called since the last poll or have running calls; forgets the others."""
        self._forget_refused()
        pending = []
        for key, tracked in list(self._active.items()):
            if tracked.called or tracked.calls:
                tracked.called = False
                pending.append(tracked.attribution)
            else:
                del self._active[key], self._tracked[key]
        if not self._active:
            self._busy.clear()
        return pending

    def update(self, attribution: Attribution, status: AttemptStatus) -> int:
        """Applies a polled status; returns the number of running calls that it cancels.

        An attempt whose key names a project other than its rollout's counts as not found.
        """
        key = _key(attribution)
        state = status.state
        if state is AttemptState.LIVE and status.project != attribution.project:
            state = AttemptState.NOT_FOUND
        tracked = self._active.get(key)
        if tracked is None or state is AttemptState.LIVE:
            return 0
        del self._active[key]
        tracked.state = state
        heapq.heappush(self._refused, (attribution.expires_s, key))
        for call in tracked.calls:
            call.interrupt()
        return len(tracked.calls)

    def recheck(self, attributions: Iterable[Attribution]) -> None:
        """Schedules attempts for the next poll because this one failed."""
        for attribution in attributions:
            tracked = self._active.get(_key(attribution))
            if tracked is not None:
                tracked.called = True

    def _forget_refused(self) -> None:
        now_s = self._clock()
        while self._refused and (self._refused[0][0] <= now_s or len(self._refused) > self._max_refused):
            del self._tracked[heapq.heappop(self._refused)[1]]


class AttemptTie:
    """Ties a call to its attempt: raises AttemptOver in its block as soon as the attempt is known to have ended.

    Follows the protocol of `asyncio.timeout`: only its own cancellation becomes an error.
    """

    __slots__ = ("_attempt", "_before", "_interrupted", "_task")

    def __init__(self, guard: AttemptGuard, attribution: Attribution) -> None:
        """Ties the call of the current task.

        Raises:
            AttemptOver: if the attempt has already ended.
        """
        self._interrupted = False
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()
        self._attempt: TrackedAttempt = guard.enter(attribution, self)

    def interrupt(self) -> None:
        """Cancels the call."""
        if self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    def __enter__(self) -> AttemptTie:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._attempt.calls.discard(self)
        if not self._interrupted or self._task is None:
            return
        mine = self._task.uncancel() <= self._before
        # Over gRPC the disconnect watch cannot distinguish this cancellation from the caller's, and reports CallerGone.
        if mine and kind in (asyncio.CancelledError, CallerGone):
            raise attempt_over(self._attempt.attribution.attempt, self._attempt.state) from error
