"""Waits for another service during outages: calls are retried until they are answered, and the wait is reported.

Only for idempotent calls.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fulmen_algorithm.runs.failure import AWAY

__all__ = ["AWAY", "FIRST_WAIT_S", "Notify", "Outage", "Patience"]

Result = TypeVar("Result")
Notify = Callable[[str, str], None]

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Waits for one service during outages.

    Attributes:
        service: Name of the service in notices.
        notify: Receives a severity and a text.
        limit_s: Maximum length of an outage, in seconds.
    """

    service: str
    notify: Notify
    limit_s: float

    async def call(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Calls until the service answers.

        Raises:
            Unavailable: if the outage is longer than `limit_s`; or another error of the last call.
            FulmenError: if the service answers with another error.
        """
        outage = Outage(patience=self)
        while True:
            try:
                result = await attempt()
            except AWAY:
                if outage.too_long:
                    raise
                await outage.wait()
            else:
                outage.over()
                return result


@dataclass(slots=True, kw_only=True)
class Outage:
    """One outage, from the first failure to the first answer."""

    patience: Patience
    began: float | None = None
    next_wait_s: float = FIRST_WAIT_S

    @property
    def too_long(self) -> bool:
        """Whether the outage limit has passed."""
        return self.began is not None and time.monotonic() - self.began > self.patience.limit_s

    async def wait(self) -> None:
        """Waits before the next retry, longer each time; the first wait is reported."""
        if self.began is None:
            self.began = time.monotonic()
            self.patience.notify("warning", f"The {self.patience.service} does not answer; the run waits for it.")
        await asyncio.sleep(self.next_wait_s)
        self.next_wait_s = min(self.next_wait_s * 2, LONGEST_WAIT_S)

    def over(self) -> None:
        """Records an answer."""
        if self.began is not None:
            seconds = time.monotonic() - self.began
            self.patience.notify("info", f"The {self.patience.service} answers again after {seconds:.1f} s.")
        self.began, self.next_wait_s = None, FIRST_WAIT_S
