"""Background role: gives leases back that no runner was told of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from fulmen.errors import DatabaseUnavailable
from fulmen_store.leases.attempt_ends import AttemptEnds
from fulmen_store.leases.leases import AttemptReport
from fulmen_store.periodic import Pace

__all__ = ["LeaseReturner"]

RETRY_PAUSE_S: Final = 0.5


class LeaseReturner:
    """Releases leases until the release is durable; it costs their rollouts no attempt."""

    def __init__(self, ends: AttemptEnds) -> None:
        """Takes the use case that ends attempts."""
        self._ends = ends
        self._waiting: asyncio.Queue[Sequence[AttemptReport]] = asyncio.Queue()

    def give_back(self, reports: Sequence[AttemptReport]) -> None:
        """Queues leases to be released."""
        self._waiting.put_nowait(reports)

    async def run(self) -> None:
        """Releases until it is cancelled."""
        while True:
            reports = await self._waiting.get()
            try:
                await self._ends.report(reports)
            except DatabaseUnavailable:
                self.give_back(reports)
                await Pace(RETRY_PAUSE_S).next()
