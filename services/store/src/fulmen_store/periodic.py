"""The timer of background roles."""

from __future__ import annotations

import asyncio

__all__ = ["Pace"]


class Pace:
    """Lets a role do its work once per interval."""

    def __init__(self, interval_s: float) -> None:
        """Takes the seconds between two runs."""
        self._interval_s = interval_s

    async def next(self) -> None:
        """Waits for the next turn."""
        await asyncio.sleep(self._interval_s)
