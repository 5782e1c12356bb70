"""Refusals are delayed: a client that calls again immediately would otherwise cost as much as one that is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

HOLD_S: Final = 0.1
"""Time for which a refusal is held back, at least."""
MAX_HOLD_S: Final = 5.0
SPACING_S: Final = 0.01
"""Time by which each refusal that is held back delays the next one of the same origin."""
MAX_HELD: Final = 4_000
"""Refusals that are held back at a time. What has arrived of their requests stays in memory: 64 KiB each at most."""


class Refusals:
    """Holds refusals back, the longer the more of an origin is held; beyond `MAX_HELD` they are not held."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._total = 0

    def is_holding(self, origin: str) -> bool:
        """Returns True if a refusal of an origin is held back now."""
        return origin in self._held

    async def hold(self, origin: str) -> None:
        """Waits before a refusal of a project or an address, at most `MAX_HOLD_S`."""
        if self._total >= MAX_HELD:
            return
        self._total += 1
        self._held[origin] += 1
        try:
            await asyncio.sleep(max(HOLD_S, min(self._held[origin] * SPACING_S, MAX_HOLD_S)))
        finally:
            self._total -= 1
            self._held[origin] -= 1
            if not self._held[origin]:
                del self._held[origin]
