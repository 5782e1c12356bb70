"""An event loop for simulations: its clock stands still while there is work, and leaps to the next timer when there is none.

So what takes time in the simulation takes exactly as long as it says, and what only the machine needs takes none: a
busy machine makes the simulation last longer and its figures no different. It holds for what runs in this loop. Other threads
and processes are given a moment to answer before each long leap.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")

_LARGEST_LEAP = 20.0
"""How many times faster than the machine's the clock may run while nothing happens."""
_MOMENT_S = 0.001
"""The shortest wait of a selector; a shorter one is none."""


class _LeapingSelector(selectors.DefaultSelector):
    """Waits a moment for events, and counts the time that it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.leaps = False
        self._now_s = 0.0

    def now_s(self) -> float:
        """Returns the time of the loop's clock, seconds."""
        return self._now_s if self.leaps else time.monotonic()

    def start(self) -> None:
        """Begins to leap."""
        self._now_s = time.monotonic()
        self.leaps = True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns what is ready; if nothing is, the time of the timeout has passed."""
        if not self.leaps or timeout is None or timeout <= 0:
            return super().select(timeout)
        moment_s = timeout / _LARGEST_LEAP
        events = super().select(moment_s if moment_s >= _MOMENT_S else 0)
        if not events:
            self._now_s += timeout
        return events


class LeapingLoop(asyncio.SelectorEventLoop):
    """The loop; `leap` starts its clock's leaps, until then it is the machine's."""

    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        """Returns the time of the simulation, seconds."""
        return self._leaping.now_s()

    def leap(self) -> None:
        """Lets the clock leap from now on."""
        self._leaping.start()


def leap() -> None:
    """Lets the clock of the running loop leap from now on.

    Raises:
        TypeError: if it is no `LeapingLoop`.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, LeapingLoop):
        raise TypeError("The clock of this loop cannot leap.")
    loop.leap()


def run(main: Coroutine[object, object, T]) -> T:
    """Runs a coroutine in a new loop."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(main)
