"""The ledger of attempts: their undelivered calls, and the outcomes of the others.

Invariant: an attempt is settled exactly when none of its calls is running and the store has acknowledged or permanently
refused every recorded call, or the call is lost and counted as unusable. One event loop owns the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The recorded calls of an attempt.

    Attributes:
        flushed: whether the store has everything that was recorded.
        infra_failures: calls that failed after all retries for a reason other than the agent's request.
        unusable: recorded calls that may not be trained on.
        throttled: calls answered with 429 or 503 after all retries.
    """

    attempt: str
    flushed: bool
    calls: int = 0
    infra_failures: int = 0
    unusable: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    throttled: int = 0


class Follower(Protocol):
    """Receives events of attempts."""

    def began(self, attempt: str) -> None:
        """A call of an attempt begins, or a recorded one has yet to be delivered."""

    def settled(self, attempt: str) -> None:
        """An attempt is settled."""


@dataclass(slots=True)
class _Account:
    touched_s: float
    running: int = 0
    unacknowledged: int = 0
    calls: int = 0
    infra_failures: int = 0
    unusable: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    throttled: int = 0
    settled: asyncio.Event | None = None

    @property
    def is_settled(self) -> bool:
        return self.running == 0 and self.unacknowledged == 0


class AttemptLedger:
    """Keeps an account of every attempt that has called recently."""

    def __init__(self, *, keep_s: float, clock: Callable[[], float]) -> None:
        """Creates an empty ledger.

        Args:
            keep_s: time for which a settled account is kept after its last call or flush, seconds.
            clock: monotonic clock, seconds.
        """
        self._keep_s = keep_s
        self._clock = clock
        # Least recently touched first.
        self._accounts: dict[str, _Account] = {}
        self._follower: Follower | None = None

    def follow(self, follower: Follower) -> None:
        """Sets the receiver of events of attempts."""
        self._follower = follower

    def running(self, attempt: str) -> int:
        """Returns the number of running calls of an attempt."""
        account = self._accounts.get(attempt)
        return 0 if account is None else account.running

    def begin(self, attempt: str) -> None:
        """Counts a call that starts."""
        account = self._touch(attempt)
        account.calls += 1
        account.running += 1
        if self._follower is not None:
            self._follower.began(attempt)

    def end(self, attempt: str, *, recorded: bool, infra_failure: bool, throttled: bool = False) -> None:
        """Counts the end of a call; a recorded call has yet to reach the store."""
        account = self._touch(attempt)
        account.running -= 1
        account.unacknowledged += recorded
        account.infra_failures += infra_failure
        account.throttled += throttled
        self._settle(attempt, account)

    def adopt(self, attempt: str, *, calls: int) -> None:
        """Counts calls recorded by an earlier process, which this one has to deliver."""
        account = self._touch(attempt)
        account.calls += calls
        account.unacknowledged += calls
        if self._follower is not None:
            self._follower.began(attempt)

    def delivered(
        self, attempt: str, *, calls: int, unusable: int, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        """Counts recorded calls that the store has acknowledged, or that are lost and thereby unusable."""
        account = self._touch(attempt)
        account.unacknowledged -= calls
        account.unusable += unusable
        account.prompt_tokens += prompt_tokens
        account.completion_tokens += completion_tokens
        self._settle(attempt, account)

    def is_settled(self, attempt: str) -> bool:
        """Returns whether no call of an attempt is running or undelivered; true if it made no call here."""
        account = self._accounts.get(attempt)
        return account is None or account.is_settled

    async def settled(self, attempt: str) -> None:
        """Waits until the attempt is settled. The caller sets the deadline."""
        account = self._accounts.get(attempt)
        while account is not None and not account.is_settled:
            if account.settled is None or account.settled.is_set():
                account.settled = asyncio.Event()
            await account.settled.wait()

    def summary(self, attempt: str) -> Summary:
        """Returns the summary of an attempt so far."""
        if attempt not in self._accounts:
            return Summary(attempt=attempt, flushed=True)
        account = self._touch(attempt)
        return Summary(
            attempt=attempt,
            flushed=account.is_settled,
            calls=account.calls,
            infra_failures=account.infra_failures,
            unusable=account.unusable,
            prompt_tokens=account.prompt_tokens,
            completion_tokens=account.completion_tokens,
            throttled=account.throttled,
        )

    def _settle(self, attempt: str, account: _Account) -> None:
        if not account.is_settled:
            return
        if account.settled is not None:
            account.settled.set()
        if self._follower is not None:
            self._follower.settled(attempt)

    def _touch(self, attempt: str) -> _Account:
        now = self._clock()
        account = self._accounts.pop(attempt, None) or _Account(now)
        account.touched_s = now
        self._accounts[attempt] = account
        self._forget(now)
        return account

    def _forget(self, now_s: float) -> None:
        while True:
            attempt, account = next(iter(self._accounts.items()))
            if account.touched_s >= now_s - self._keep_s:
                return
            del self._accounts[attempt]
            if not account.is_settled:
                # In use: moves to the end, so that it does not block the others.
                account.touched_s = now_s
                self._accounts[attempt] = account
