"""Refusals come late: a client that calls again at once would otherwise cost as much as one that is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

HOLD_S: Final = 0.1
"""Time for which a refusal is held back, at least."""
MAX_HOLD_S: Final = 5.0
SPACING_S: Final = 0.01
"""Time by which each unit that is held back delays the next refusal of the same origin."""
MAX_HELD: Final = 4_000
"""Units that are held back at a time: one for a refusal, and one for each 64 KiB of its body. Bodies stay in memory: 250 MiB at
most."""


class Refusals:
    """Holds refusals back, the longer the more of an origin is held; beyond `MAX_HELD` they are not held."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._total = 0

    def is_holding(self, origin: str) -> bool:
        """Returns True if a refusal of an origin is held back now."""
        return origin in self._held

    async def hold(self, origin: str, units: int = 1) -> None:
        """Waits before a refusal, at most `MAX_HOLD_S`.

        Args:
            origin: The project or address that is refused.
            units: What the refusal has cost; see `MAX_HELD`.
        """
        if self._total + units > MAX_HELD:
            return
        self._total += units
        self._held[origin] += units
        try:
            await asyncio.sleep(max(HOLD_S, min(self._held[origin] * SPACING_S, MAX_HOLD_S)))
        finally:
            self._total -= units
            self._held[origin] -= units
            if not self._held[origin]:
                del self._held[origin]
