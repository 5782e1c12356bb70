"""Orders of people to runners: slots to set, and to drain.

An order is a row before it is acknowledged. It is sent to its runner over the stream that the runner holds open, to
whichever replica: a hint makes that replica poll immediately; a regular poll finds what no hint reported. Each stream gets
it once, until the runner has confirmed it; so a runner that was away gets it when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fulmen.errors import DatabaseUnavailable
from fulmen_store.events import Event
from fulmen_store.runners.table import OrderTable
from fulmen_store.scheduling.runner_streams import RunnerStreams
from fulmen_store.waiting import waited

__all__ = ["OrderDraft", "RunnerOrders"]

POLL_INTERVAL_S: Final = 2.0
# Hints of this time share a look.
PAUSE_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDraft:
    """What is ordered.

    Attributes:
        slots: Number of slots, 0 for automatic; None leaves them.
        drains: Whether the runner is to drain.
        grace_s: Grace of running attempts, seconds; None is the runner's setting.
    """

    slots: int | None = None
    drains: bool = False
    grace_s: float | None = None


class RunnerOrders:
    """Background role: passes orders to the runners connected to this replica."""

    def __init__(self, *, table: OrderTable, streams: RunnerStreams, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        """Creates the role, which looks for pending orders on a hint and every `poll_interval_s` seconds."""
        self.ordered: Event[UUID] = Event()
        """Emitted for the other replicas: a runner that is not connected here has an order."""
        self._table = table
        self._streams = streams
        self._poll_interval_s = poll_interval_s
        self._hinted = asyncio.Event()

    async def order(self, session_id: UUID, draft: OrderDraft) -> bool:
        """Records an order, which the runner gets soon; returns False if the session has ended."""
        if not await self._table.add(session_id, slots=draft.slots, drains=draft.drains, grace_s=draft.grace_s):
            return False
        if self._streams.find(session_id) is None:
            self.ordered.emit(session_id)
        else:
            self._hinted.set()
        return True

    async def confirm(self, session_id: UUID, number: int, *, load: bytes | None) -> None:
        """Records that a runner carries out its orders up to a number, and the load that it reported with it."""
        await self._table.confirm(session_id, number, load=load)

    def hint(self, session_ids: Collection[UUID]) -> None:
        """Makes the role look soon if some of these runners are connected here."""
        if any(self._streams.find(session_id) for session_id in session_ids):
            self._hinted.set()

    async def run(self) -> None:
        """Passes orders until cancelled."""
        while True:
            await waited(self._hinted, self._poll_interval_s)
            self._hinted.clear()
            try:
                await self.send_pending()
            except DatabaseUnavailable:
                continue
            finally:
                await asyncio.sleep(PAUSE_S)

    async def send_pending(self) -> None:
        """Sends the orders that are not confirmed to the runners connected here, unless their streams got them before.

        Raises:
            DatabaseUnavailable: If they cannot be read.
        """
        if not len(self._streams):
            return
        for session_id, order in await self._table.pending():
            stream = self._streams.find(session_id)
            if stream is not None:
                stream.send_order(order)
