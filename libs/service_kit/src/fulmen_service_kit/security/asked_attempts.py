"""Answers of the store about attempts whose keys look expired.

An attempt key is good for as long as its attempt runs, and only the store knows that. Until the key's expiry it is taken on
trust; afterwards the store is asked. So a clock that is wrong costs questions, and fails no attempt that runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from fulmen.errors import FulmenError, Unavailable

if TYPE_CHECKING:
    from fulmen_service_kit.security.tokens import Caller

Runs = Callable[["Caller"], Awaitable[bool]]

KEEP_S: Final = 3.0
"""Time for which an answer counts: the key of an attempt that has ended since is refused within it."""

SLACK_S: Final = 0.5
MAX_KEPT: Final = 8192


class AskedAttempts:
    """Asks the store about attempts, and keeps the answers for some seconds."""

    def __init__(self, runs: Runs, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Asks nothing yet.

        Args:
            runs: Asks whether the attempt of a key has not ended. Raises FulmenError.
            clock: Seconds that only grow.
        """
        self._runs = runs
        self._clock = clock
        self._answers: OrderedDict[str, tuple[float, Caller | None]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[None]] = {}

    def knows(self, key: str) -> bool:
        """Returns whether an answer about a key still counts."""
        answer = self._answers.get(key)
        return answer is not None and answer[0] > self._clock()

    def caller(self, key: str) -> Caller | None:
        """Returns the caller of a key whose attempt runs, by a recent answer of the store; otherwise None."""
        answer = self._answers.get(key)
        # A little longer: an answer that is known when a call is checked must not be gone a microsecond later.
        return answer[1] if answer is not None and answer[0] + SLACK_S > self._clock() else None

    def forget(self, key: str | None = None) -> None:
        """Forgets the answer about a key, or all answers."""
        if key is None:
            self._answers.clear()
        else:
            self._answers.pop(key, None)

    async def ask(self, key: str, caller: Caller, *, now_s: float) -> None:
        """Asks about the attempt of a key. Callers that ask at the same time share a question.

        Args:
            key: The key.
            caller: Its caller.
            now_s: The time by which the key looks expired, Unix seconds.

        Raises:
            Unavailable: If the store does not answer; names the attempt.
        """
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.create_task(self._ask(key, caller, now_s), name="ask about an attempt")
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        # A caller that leaves does not end it for the others.
        await asyncio.shield(asking)

    async def _ask(self, key: str, caller: Caller, now_s: float) -> None:
        try:
            is_running = await self._runs(caller)
        except FulmenError as error:
            raise Unavailable(
                "The store cannot confirm now that the attempt is still running; retry.", attempt=caller.subject
            ) from error
        # The caller expires with the answer, so that open streams are checked again, too.
        self._answers[key] = (self._clock() + KEEP_S, replace(caller, expires_s=now_s + KEEP_S) if is_running else None)
        self._answers.move_to_end(key)
        if len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)
