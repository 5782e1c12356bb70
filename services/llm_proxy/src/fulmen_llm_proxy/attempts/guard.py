"""Which attempts may still call models, as the store last said.

Invariant: an attempt that the store has found over is refused until its key expires; one of which the store has not
spoken yet is let through. An attempt that makes no calls is forgotten, and nobody is asked about it. One event loop
owns the guard.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Protocol

from fulmen.errors import AttemptOver
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_service_kit.http_wire import CallerGone

MAX_REFUSED: Final = 100_000
"""Refused attempts that are remembered at most; those whose keys expire first are forgotten first."""


class Verdict(StrEnum):
    """How an attempt stands."""

    LIVE = "live"
    ENDED = "ended"
    STALE_EPOCH = "stale_epoch"
    CANCEL_REQUESTED = "cancel_requested"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the store says of an attempt; project and mode are empty where it is not found."""

    verdict: Verdict
    project: str = ""
    mode: str = ""


class Interruptible(Protocol):
    """A call that runs."""

    def interrupt(self) -> None:
        """Ends the call soon, from outside of it."""
        ...


@dataclass(slots=True, eq=False)
class Use:
    """An attempt that calls, or is refused.

    Attributes:
        called: whether it called since the store was last asked about it.
        calls: its calls that run.
    """

    attribution: Attribution
    verdict: Verdict = Verdict.LIVE
    called: bool = True
    calls: set[Interruptible] = field(default_factory=set)


_Key = tuple[str, int, str]

_WHY: Final = {
    Verdict.ENDED: "The attempt has ended: its key no longer counts.",
    Verdict.STALE_EPOCH: "A newer attempt of the rollout runs: the key of this one no longer counts.",
    Verdict.CANCEL_REQUESTED: "The rollout was cancelled: the attempt is to stop.",
    Verdict.NOT_FOUND: "There is no such attempt: its key does not count.",
}


def _key(attribution: Attribution) -> _Key:
    # With the project: what one key says falsely is no harm to another.
    return attribution.attempt, attribution.epoch, attribution.project


def attempt_over(attempt: str, verdict: Verdict) -> AttemptOver:
    """Makes the error of an attempt that is not LIVE."""
    return AttemptOver(_WHY[verdict], attempt=attempt, why=verdict.value)


class AttemptGuard:
    """Refuses the calls of attempts that are over, and ends those that run."""

    def __init__(self, *, clock: Callable[[], float], max_refused: int = MAX_REFUSED) -> None:
        """Creates a guard that knows of no attempt.

        Args:
            clock: Unix time in seconds, by which keys expire.
            max_refused: refused attempts that are remembered at most.
        """
        self._clock = clock
        self._max_refused = max_refused
        self._uses: dict[_Key, Use] = {}
        self._active: dict[_Key, Use] = {}
        # By expiry, the first to expire first; each of them is in `_uses` too.
        self._refused: list[tuple[float, _Key]] = []
        self._busy = asyncio.Event()

    def enter(self, attribution: Attribution, call: Interruptible) -> Use:
        """Lets a call of an attempt begin; to be left when it is over.

        Raises:
            AttemptOver: if the attempt is over.
        """
        key = _key(attribution)
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = self._active[key] = Use(attribution)
            self._busy.set()
        elif use.verdict is not Verdict.LIVE:
            raise attempt_over(attribution.attempt, use.verdict)
        use.called = True
        use.calls.add(call)
        return use

    def require(self, attribution: Attribution) -> None:
        """Checks that an attempt may call.

        Raises:
            AttemptOver: if it is over.
        """
        use = self._uses.get(_key(attribution))
        if use is not None and use.verdict is not Verdict.LIVE:
            raise attempt_over(attribution.attempt, use.verdict)

    async def busy(self) -> None:
        """Returns as soon as there is an attempt to ask about; the caller bounds the wait, or is a role."""
        await self._busy.wait()

    def questions(self) -> list[Attribution]:
        """Returns the attempts that called since the last time, or have calls running; forgets the others."""
        self._forget_refused()
        asked = []
        for key, use in list(self._active.items()):
            if use.called or use.calls:
                use.called = False
                asked.append(use.attribution)
            else:
                del self._active[key], self._uses[key]
        if not self._active:
            self._busy.clear()
        return asked

    def answered(self, attribution: Attribution, standing: Standing) -> int:
        """Takes the store's answer to a question; returns how many running calls it ends.

        An attempt whose key names another project than its rollout's counts as not found.
        """
        key = _key(attribution)
        verdict = standing.verdict
        if verdict is Verdict.LIVE and standing.project != attribution.project:
            verdict = Verdict.NOT_FOUND
        use = self._active.get(key)
        if use is None or verdict is Verdict.LIVE:
            return 0
        del self._active[key]
        use.verdict = verdict
        heapq.heappush(self._refused, (attribution.expires_s, key))
        for call in use.calls:
            call.interrupt()
        return len(use.calls)

    def unanswered(self, attributions: Iterable[Attribution]) -> None:
        """Takes note that the store could not be asked: what was known stays, and it is asked again."""
        for attribution in attributions:
            use = self._active.get(_key(attribution))
            if use is not None:
                use.called = True

    def _forget_refused(self) -> None:
        now_s = self._clock()
        while self._refused and (self._refused[0][0] <= now_s or len(self._refused) > self._max_refused):
            del self._uses[heapq.heappop(self._refused)[1]]


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
